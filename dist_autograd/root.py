"""A backward pass as its root runs it: mark, run, wait for the others.

Only the root knows which workers take part. It asks each worker what the marks on it lead to, and passes on
the answers, round after round, until there are no new marks. Then it starts the others' parts, runs its own
pass, from which gradients flow to them, and waits until each has answered that it is done. The first error
ends the backward pass on all workers.

Usually it need not ask. A message to the context's creator includes the marks that its tensors lead to, if
they are found quickly. If all that takes part at a worker is one message to the root with such marks, its
part is started by the gradients themselves: it needs nothing else.

At the end of its part, a worker may perform the step of an optimizer (``Steps``), if its own gradients are
complete then, while other workers may still compute theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from dist_autograd.backward_messages import Key, RemotePart, SentMessages, failure_of, given_up
from dist_autograd.device_threads import refuse_here
from dist_autograd.graph import Mark
from dist_autograd.progress import Action, Error, Event
from dist_autograd.recording import Origin
from dist_autograd.torch_internals import current_task
from dist_autograd.worker_pass import WorkerPass
from rpc.errors import AutogradError, ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.runtime import waits
from rpc.runtime.interrupts import is_interruption
from rpc.wire.frames import Frame, Kind
from rref.protocol.messages import RRefId

__all__ = ["Root", "Steps", "checked"]


class Steps:
    """The steps of optimizers on other workers, each performed at the end of its worker's part of a backward.

    Args:
        optimizers: for each worker the optimizer, an object there; its ``step`` takes the context's id.

    Attributes:
        optimizers: as given.
        begun: the workers whose part has been started, and has neither failed nor ended without a step.
        done: those that have performed their step.
    """

    def __init__(self, optimizers: Mapping[Peer, RRefId]) -> None:
        self.optimizers = optimizers
        self.begun: set[Peer] = set()
        self.done: set[Peer] = set()


_NO_STEPS: Final = Steps({})


class Root:
    """Runs one backward pass. ``run`` is called once; ``fail`` from any thread.

    Args:
        key: id of the backward pass.
        own: this worker's own part.
        me: this worker.
        messages: sends messages to the others.
        find: returns the worker with an incarnation.
        steps: the steps that other workers perform.
    """

    def __init__(
        self,
        key: Key,
        own: WorkerPass,
        me: Peer,
        messages: SentMessages,
        find: Callable[[int], Peer | None],
        steps: Steps = _NO_STEPS,
    ) -> None:
        self.key = key
        self.own = own
        self.peer = me
        self._messages = messages
        self._find = find
        self._steps = steps
        self._marked: set[Mark] = set()
        self._asked: set[Peer] = set()
        self._told: dict[Peer, list[Mark]] = {}
        """For each worker the marks that are to be sent with the start of its part."""
        self._parts: dict[Peer, RemotePart] = {}
        """Parts that were started and whose end has not been handled. The thread that removes one
        handles it.
        """
        self._left: set[Peer] = set()
        """Workers that are not done, or have not started."""
        own.progress.on(Event.BEGIN)

    def run(self, roots: Sequence[Tensor]) -> None:
        """Run the backward pass; raises the error that ended it."""
        nested = current_task() != -1
        if nested:
            refuse_here()
        try:
            self._mark_all(self.own.start(roots))
            self._left = self._asked | self._told.keys()
            self._begin_parts()
            self._run_own(roots, nested)
            while self._left:
                self.own.progress.check()
                part = next(iter(self._parts.copy().values()), None)
                self._wait_for(part, lambda: not self._left)
            self.own.progress.check()
        except BaseException as error:
            self.fail(given_up)  # the part of a nested one may go on after an interruption
            for peer in self._asked | self._left:
                self._messages.abort(self.key, peer, error)
            raise
        finally:
            self._parts.clear()

    # ---- mark

    def _mark_all(self, found: Sequence[Mark]) -> None:
        """Follow marks to the ends of the graph, on all workers."""
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
        """Follow marks as far as is known here; returns those whose workers must be asked."""
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
        """Start the others' parts, except for those of one message: they are started by its gradients."""
        for peer in self._asked:
            self._begin(peer, ())
        for peer, marks in list(self._told.items()):
            if len(marks) > 1 and any(mark.message != marks[0].message for mark in marks):
                self._begin(peer, self._told.pop(peer))

    def _begin(
        self, peer: Peer, marks: Sequence[Mark], whole: tuple[Origin, Sequence[Tensor | None]] | None = None
    ) -> None:
        part = self._parts[peer] = self._messages.new_part(peer)
        part.when_settled = self._settled
        optimizer = self._steps.optimizers.get(peer)
        if optimizer is not None:
            self._steps.begun.add(peer)
        own = self.own
        try:
            self._messages.begin(part, self.key, own.context, own.retain_graph, marks, whole, optimizer)
        except BaseException:
            self._steps.begun.discard(peer)
            raise

    def _run_own(self, roots: Sequence[Tensor], nested: bool) -> None:
        gradients = list(map(torch.ones_like, roots))
        try:
            if nested:
                run = self.own.context.requests.border.elsewhere(self.own.run)
                _on_another_thread(partial(run, self, roots, gradients))
            else:
                self.own.run(self, roots, gradients)
        except RpcError:
            raise
        except Exception as error:
            if is_interruption(error):
                raise
            raise failure_of(self.peer.member.info, error) from error

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        marks = self._told.pop(origin.source, None)
        if marks is None:
            self._messages.gradients(self.key, origin, gradients)
        else:
            self._begin(origin.source, marks, (origin, gradients))

    # ---- wait

    def wait(self, ready: Callable[[], bool]) -> None:
        part = next(iter(self._parts.copy().values()), None) if len(self._left) == 1 else None
        self._wait_for(part if part is not None and part.whole else None, ready)

    def _wait_for(self, part: RemotePart | None, ready: Callable[[], bool]) -> None:
        """Wait for the end of a part, or for any event if there is no part to wait for."""
        with waits.waiting("backward", lambda: [peer.name for peer in self._left.copy()]):
            if part is None:
                self.own.progress.wait(ready)
            else:
                part.wait()
                self._settled(part)

    def _settled(self, part: RemotePart) -> None:
        """Handle the end of a part: it was answered, its worker is gone, or it was cancelled."""
        peer = part.peer
        if self._parts.pop(peer, None) is None:
            return
        part.when_settled = None
        outcome = part.outcome
        if isinstance(outcome, Frame) and outcome.kind == Kind.REPLY:
            try:
                self._done(peer, outcome)
            except ProtocolError as error:
                self.fail(partial(_itself, error))
        elif isinstance(outcome, Frame):
            self._steps.begun.discard(peer)
            self.fail(partial(self._messages.failure, peer, outcome))
        elif outcome is not None:
            self.fail(partial(_itself, outcome))

    def _done(self, peer: Peer, answer: Frame) -> None:
        message = answer.header.get("gradients")
        if type(message) is int:
            self.own.arrived(message, peer, answer)
        if peer in self._steps.begun and answer.header.get("stepped") is True:
            self._steps.done.add(peer)
        else:
            self._steps.begun.discard(peer)
        self._left.discard(peer)
        self.own.progress.on(Event.NEWS)

    def fail(self, error: Error) -> Action:
        """End the backward pass; only the first error is kept."""
        action = self.own.progress.on(Event.FAIL, error)
        if action is Action.WAKE:
            for part in tuple(self._parts.values()):
                self._messages.cancel(part, given_up())
        return action


def checked(roots: Sequence[Any]) -> list[Tensor]:
    """Return the roots, if a backward pass can start at each of them.

    Raises:
        AutogradError, TypeError: there is none, or one that was not computed, or is not a scalar.
    """
    if not roots:
        raise AutogradError("No tensors provided for gradient computation: roots is empty")
    for position, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise TypeError(
                "backward(): incompatible function arguments: the roots must be tensors, not "
                f"{type(root).__name__}"
            )
        which = f"root {position}, of shape {tuple(root.shape)},"
        if not root.requires_grad:
            raise AutogradError(f"requires_grad not set on {which} so nothing leads back from it")
        if root.numel() != 1:
            raise AutogradError(
                f"{which} is not a scalar, all roots need to be scalar: take its sum() or mean() first"
            )
        if root.grad_fn is None:
            raise AutogradError(
                f"{which} does not have a valid gradient function: it is a leaf, which nothing computes"
            )
    return list(roots)


def _itself(error: BaseException) -> BaseException:
    return error


def _on_another_thread(run: Callable[[], Any]) -> None:
    """Run a pass from within another; on this thread, the engine would mix the nodes of the two. Calls made
    in the pass are in the context of this thread.
    """
    errors: list[BaseException] = []
    context = copy_context()

    def catch() -> None:
        try:
            context.run(run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catch, name="farcall-nested-backward", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
