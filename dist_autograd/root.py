"""A backward as its root sees it: mark, run, wait for the others.

The root alone knows who takes part. It asks each worker what the marks on it lead to, and passes on what it
is told, round after round, until nothing new comes up. Then it has the others begin, runs its own pass, from
which gradients flow to them, and waits until each has answered that it is done. The first error ends it
everywhere.

Mostly it need not ask. A message to whoever made the context says what lies behind its tensors, if that is
soon found out. Where all that takes part at a worker is one message to the root, and it says so, the worker
need not even be told before its gradients come: these begin its part, and they are all that it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_autograd import engine
from dist_autograd.backward_messages import Key, SentMessages, failure_of, given_up
from dist_autograd.graph import Mark
from dist_autograd.progress import Action, Error, Event
from dist_autograd.recording import Origin
from dist_autograd.remote_part import RemotePart
from dist_autograd.worker_pass import WorkerPass
from rpc.errors import AutogradError, ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.runtime import waits
from rpc.wire.frames import Frame, Kind

__all__ = ["Root"]


class Root:
    """Runs one backward. ``run`` is called once; ``fail`` from any thread.

    Args:
        key: of the backward.
        own: this worker's own part.
        me: this worker.
        messages: to the others.
        find: returns the worker of an incarnation.
    """

    def __init__(
        self, key: Key, own: WorkerPass, me: Peer, messages: SentMessages, find: Callable[[int], Peer | None]
    ) -> None:
        self.key = key
        self.own = own
        self.peer = me
        self.load = messages.load
        self._messages = messages
        self._find = find
        self._marked: set[Mark] = set()
        self._asked: set[Peer] = set()
        self._told: dict[Peer, list[Mark]] = {}
        """By worker the marks that it is still to be told, with what begins its part."""
        self._parts: dict[Peer, RemotePart] = {}
        """Those begun, of whose end nobody has taken note. Who takes one out does."""
        self._left: set[Peer] = set()
        """Who is not done, or has not begun."""
        own.progress.on(Event.BEGIN)

    def run(self, roots: Sequence[Tensor]) -> None:
        """Run the backward; raises what ended it."""
        try:
            self._mark_all(self.own.start(roots))
            self._left = self._asked | self._told.keys()
            self._begin_parts()
            self._run_own(roots)
            while self._left:
                self.own.progress.check()
                self._wait_for(self._one_part(), lambda: not self._left)
            self.own.progress.check()
        except BaseException as error:
            self.fail(given_up)  # a nested one's own part may go on after Ctrl-C
            for peer in self._asked | self._left:
                self._messages.abort(self.key, peer, error)
            raise
        finally:
            self._parts.clear()

    # ---- mark

    def _mark_all(self, found: Sequence[Mark]) -> None:
        """Follow marks to the ends of the graph, wherever they lead."""
        todo = list(found)
        key, own, messages = self.key, self.own, self._messages
        while todo:
            unknown = self._follow(todo)
            answers = []
            for peer, marks in unknown.items():
                self._asked.add(peer)
                all_marks = [*self._told.pop(peer, ()), *marks]
                answers.append(messages.mark(key, own.context, peer, own.retain_graph, all_marks))
            for answer in answers:
                todo += messages.marks_in(answer)

    def _follow(self, todo: list[Mark]) -> dict[Peer, list[Mark]]:
        """Follow marks as far as is known here; returns those at workers that must be asked what follows."""
        own, marked = self.own, self._marked
        unknown: dict[Peer, list[Mark]] = {}
        while todo:
            mark = todo.pop()
            if mark in marked:
                continue
            marked.add(mark)
            peer = self._find(mark[0])
            if peer is None:
                raise AutogradError("the graph leads to a worker that is not in this group")
            if peer.is_self:
                todo += own.mark((mark[1:],), peer)
                continue
            behind = None if peer in self._asked or peer in unknown else own.behind(mark)
            if behind is None:
                unknown.setdefault(peer, []).append(mark)
            else:
                self._told.setdefault(peer, []).append(mark)
                todo += behind
        return unknown

    # ---- run

    def _begin_parts(self) -> None:
        """Have the others begin, but for those whose part is one message: they begin with its gradients."""
        for peer in self._asked:
            self._begin(peer, ())
        for peer, marks in list(self._told.items()):
            if any(mark.message != marks[0].message for mark in marks):
                self._begin(peer, self._told.pop(peer))

    def _begin(
        self, peer: Peer, marks: Sequence[Mark], whole: tuple[Origin, Sequence[Tensor | None]] | None = None
    ) -> None:
        part = self._parts[peer] = self._messages.new_part(peer)
        part.when_settled = self._settled
        self._messages.begin(part, self.key, self.own.context, self.own.retain_graph, marks, whole)

    def _run_own(self, roots: Sequence[Tensor]) -> None:
        gradients = [torch.ones_like(root) for root in roots]
        try:
            if engine.is_running():
                _on_another_thread(lambda: self.own.run(self, roots, gradients))
            else:
                self.own.run(self, roots, gradients)
        except RpcError:
            raise
        except Exception as error:
            raise failure_of(self.peer.member.info, error) from error

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        marks = self._told.pop(origin.source, None)
        if marks is None:
            self._messages.gradients(self.key, origin, gradients)
        else:
            self._begin(origin.source, marks, (origin, gradients))

    # ---- wait

    def wait(self, ready: Callable[[], bool]) -> None:
        part = self._one_part() if len(self._left) == 1 else None
        self._wait_for(part if part is not None and part.whole else None, ready)

    def _one_part(self) -> RemotePart | None:
        return next(iter(tuple(self._parts.values())), None)

    def _wait_for(self, part: RemotePart | None, ready: Callable[[], bool]) -> None:
        """Wait for the end of a part, if there is one to wait for, and else for any news."""
        with waits.waiting("backward", lambda: [peer.name for peer in self._left.copy()]):
            if part is None:
                self.own.progress.wait(ready)
            else:
                part.wait()
                self._settled(part)

    def _settled(self, part: RemotePart) -> None:
        """A worker has answered what began its part, or is gone, or is not waited for any more."""
        peer, outcome = part.peer, part.outcome
        if self._parts.pop(peer, None) is None:
            return
        part.when_settled = None
        if isinstance(outcome, Frame) and outcome.kind == Kind.REPLY:
            try:
                self._done(peer, outcome)
            except ProtocolError as error:
                self.fail(partial(_itself, error))
        elif isinstance(outcome, Frame):
            self.fail(partial(self._messages.failure, peer, outcome))
        elif outcome is not None:
            self.fail(partial(_itself, outcome))

    def _done(self, peer: Peer, answer: Frame) -> None:
        message = answer.header.get("gradients")
        if type(message) is int:
            self.own.arrived(message, peer, answer)
        self._left.discard(peer)
        self.own.progress.on(Event.NEWS)

    def fail(self, error: Error) -> Action:
        """End the backward; the first error counts."""
        action = self.own.progress.on(Event.FAIL, error)
        if action is Action.WAKE:
            for part in tuple(self._parts.values()):
                self._messages.cancel(part, given_up())
        return action


def _itself(error: BaseException) -> BaseException:
    return error


def _on_another_thread(run: Callable[[], Any]) -> None:
    """Run a pass from within another, whose nodes the engine would mix with its own on this thread."""
    errors: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catch, name="farcall-nested-backward", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
