"""A backward as its root sees it: mark, run, wait for the others.

The root alone knows who takes part. It asks each worker what the marks on it lead to, and passes on what it
is told, round after round, until nothing new comes up. Then it runs its own pass, from which gradients flow
to the others, and waits until each has said that it is done. The first error ends it everywhere.

Mostly it need not ask. A message to whoever made the context says what lies behind its tensors, if that is
soon found out. So where all that takes part at a worker was sent to this one, and all of it says so, the
worker learns what takes part with its first gradients, which come from here and from nowhere else; its
answer to these says that it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_autograd import engine
from dist_autograd.graph import Mark
from dist_autograd.parts import Part
from dist_autograd.passes import Pass
from rpc.errors import AutogradError, BackwardError, ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo

__all__ = ["Root", "Workers", "failure_of"]


class Workers:
    """What the root asks of other workers; made by ``Backwards``."""

    def __init__(
        self,
        ask: Callable[[Pass, Peer, list[tuple[int, int]]], Callable[[], list[Mark]]],
        abort: Callable[[Pass, Peer, BaseException], None],
        find: Callable[[int], Peer | None],
    ) -> None:
        self.ask = ask
        """Sends marks, by message and index; returns what waits for the marks that follow."""
        self.abort = abort
        self.find = find
        """The worker of an incarnation."""


class Root:
    """Runs one backward. ``run`` is called once; ``done`` on the loop's thread.

    Args:
        own: this worker's own part.
        workers: the others.
    """

    def __init__(self, own: Pass, workers: Workers) -> None:
        self.own = own
        self._me = own.root.member.info
        self.others: set[Peer] = set()
        self._workers = workers
        self._asked: set[Peer] = set()
        self._left: set[Peer] = set()
        self._parts: dict[Peer, Part] = {}
        self._has_run = False
        self._reading: Part | None = None
        own.wait_by_reading, own.stop_reading = self._wait_by_reading, self._stop_reading
        self._marked: set[Mark] = set()

    def run(self, roots: Sequence[Tensor]) -> None:
        """Run the backward; raises what ended it."""
        try:
            self._mark_all(self.own.start(roots))
            self._left = self.others.copy()
            self._run_own(roots, [torch.ones_like(root) for root in roots])
            self._has_run = True
            if self._left or self.own.has_failed():
                self.own.wait_until(lambda: not self._left)
        except BaseException as error:
            self.own.fail_later(_given_up)  # a nested one's own part may go on after Ctrl-C
            for peer in self.others:
                self._workers.abort(self.own, peer, error)
            raise
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Leave no cycle behind: what the pass holds of the graph is large."""
        self.own.wait_by_reading = self.own.stop_reading = None
        for part in self._parts.values():
            part.when_settled = None

    def _run_own(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        try:
            if engine.is_running():
                _on_another_thread(lambda: self.own.run(roots, gradients))
            else:
                self.own.run(roots, gradients)
        except RpcError:
            raise
        except Exception as error:
            raise failure_of(self._me, error) from error

    def _wait_by_reading(self) -> bool:
        """Wait for the one worker that is left, if its answer may well be what comes next."""
        left = tuple(self._left)  # one step: the loop's thread takes out who is done
        if len(left) != 1:
            return False
        part = self._parts.get(left[0])
        if part is None or not (part.whole or self._has_run):
            return False
        return self._read(part)

    def _read(self, part: Part, ask: Callable[[], object] | None = None) -> bool:
        self._reading = part
        try:
            if not part.read(self.own.has_failed, ask):
                return False
        finally:
            self._reading = None
        self.part_ended(part)
        return True

    def _stop_reading(self) -> None:
        part = self._reading
        if part is not None:
            part.interrupt()

    def _mark_all(self, found: Sequence[Mark]) -> None:
        """Follow marks to the ends of the graph, wherever they lead."""
        todo = list(found)
        while todo:
            unknown = self._follow(todo)
            asked: list[Callable[[], list[Mark]]] = []
            for peer, marks in unknown.items():
                self._asked.add(peer)
                all_marks = [*self.own.untold.pop(peer, ()), *marks]
                asked.append(self._workers.ask(self.own, peer, [mark[1:] for mark in all_marks]))
            for answer in asked:
                todo += answer()

    def _follow(self, todo: list[Mark]) -> dict[Peer, list[Mark]]:
        """Follow marks as far as is known here; returns those at workers that must be asked what follows."""
        own, marked = self.own, self._marked
        unknown: dict[Peer, list[Mark]] = {}
        while todo:
            mark = todo.pop()
            if mark in marked:
                continue
            marked.add(mark)
            peer = self._workers.find(mark[0])
            if peer is None:
                raise AutogradError("the graph leads to a worker that is not in this group")
            if peer.is_self:
                todo += own.mark((mark[1:],), peer)
                continue
            self.others.add(peer)
            behind = None if peer in self._asked or peer in unknown else own.behind(mark)
            if behind is None:
                unknown.setdefault(peer, []).append(mark)
            else:
                own.untold.setdefault(peer, []).append(mark)
                todo += behind
        return unknown

    def ask(self, part: Part, send: Callable[[], object], *, is_small: bool) -> None:
        """Tell a worker, with its first gradients, what takes part there.

        Args:
            part: the worker's.
            send: sends the message.
            is_small: that takes no time.
        """
        self._parts[part.peer] = part
        part.when_settled = self.part_ended
        if part.outcome is not None:
            self.part_ended(part)
        if part.whole and is_small and engine.running.known_as is None:
            self._read(part, send)  # this thread has nothing else to do
        else:
            send()

    def part_ended(self, part: Part) -> None:
        """A worker has answered its first gradients, or is gone."""
        error = part.failure()
        if error is not None:
            self.own.fail_later(error)
            return
        brought = part.brought()
        if brought is not None and part.peer in self._left:
            try:
                self.own.arrived(brought, part.peer, (part.peer, part.outcome))
            except ProtocolError as refused:
                self.own.fail(refused)
                return
        self.done(part.peer)

    def done(self, peer: Peer) -> None:
        """A worker's part is done."""
        self._left.discard(peer)
        self.own.news()


def failure_of(worker: WorkerInfo, error: BaseException) -> BackwardError:
    """What the failure of a worker's part is to the one who called ``backward``."""
    return BackwardError(
        f"Error on Node {worker.id}: {error}\n(raised in the backward on worker '{worker.name}')", worker.name
    )


def _given_up() -> BaseException:
    return AutogradError("the backward was given up by the one who began it")


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
