"""The backward passes that this worker takes part in, started by it (the root) or by other workers.

Marks and starts of parts that others continue are handled on the loop's thread, so no gradients overtake
them; gradients on the thread that has received them. A worker's part runs on a thread of its own, which is
not counted by the executor of calls, because it waits for other workers. A whole part waits for nothing, and
runs as a call does: on the thread that received it, if that thread reads for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor

from dist_autograd import backward_messages as kinds
from dist_autograd.backward_messages import Key, PartRequest, SentMessages
from dist_autograd.contexts import Context, Contexts
from dist_autograd.ddp import Models
from dist_autograd.progress import Action, Error, Event
from dist_autograd.recording import Origin
from dist_autograd.root import Root, Steps, checked
from dist_autograd.worker_pass import WorkerPass
from rpc.agent.activity import Activity
from rpc.agent.border import Work
from rpc.agent.hooks import Hooks
from rpc.agent.messages import Messages
from rpc.agent.received_requests import Answers, Request
from rpc.errors import AutogradError, BlockingCallError, NotInitializedError, is_violation
from rpc.group.peer import Peer, PeerTable
from rpc.runtime import spans
from rpc.runtime.blocking import this_thread
from rpc.runtime.executor import Executor
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind
from rref.protocol.messages import RRefId

__all__ = ["Backwards"]

_THREADS: Final = 8
_REMEMBERED: Final = 4096
"""Maximum number of failed passes that are remembered for messages that arrive late."""
_LONGEST: Final = 1000
"""Maximum number of characters of the reason that a root gives for a failure."""


class Backwards:
    """Runs backward passes. From any thread, except where noted.

    Args:
        answers: answers the requests of other workers.
        workers: the workers.
        messages: sends messages to other workers.
        activity: counts the parts that run for other workers.
        serializer: serializer of this worker.
        executor: its threads run the parts of one message.
        contexts: contexts of this worker.
        models: models of this worker under ``DistributedDataParallel``.
        step: calls the ``step`` of an object of this worker, with the id of a context; false if that must
            wait for the end of the backward.
    """

    def __init__(
        self,
        answers: Answers,
        workers: PeerTable,
        messages: SentMessages,
        activity: Activity,
        serializer: Serializer,
        executor: Executor,
        contexts: Contexts,
        models: Models,
        step: Callable[[RRefId, int], bool],
    ) -> None:
        self._requests = contexts.requests
        self._answers = answers
        self._workers = workers
        self._messages = messages
        self._activity = activity
        self._serializer = serializer
        self._executor = executor
        self._contexts = contexts
        self._models = models
        self._step = step
        self._running: dict[Key, Root | Participant] = {}
        self._failed: dict[Key, Error] = {}
        """The latest passes of other workers that have failed before this worker's part of them has begun: a
        long mark or part arrives after a shorter abort.
        """
        self._numbers = itertools.count(1)
        self._threads: Executor | None = None

    def register(self, messages: Messages, hooks: Hooks) -> None:
        """Register the handlers of messages, of the ends of contexts, and of workers that are gone."""
        messages.on(kinds.MARK, self._mark_arrived)
        messages.on(kinds.PART, self._part_arrived)
        messages.on(kinds.WHOLE_PART, partial(self._begun, whole=True), any_thread=True)
        messages.on(kinds.GRADIENTS, self._gradients_arrived, any_thread=True)
        messages.on(kinds.ABORT, self._abort_arrived)
        self._contexts.on_end(self._context_over)
        hooks.gone.append(self._peer_gone)
        hooks.awaited.append(self._awaited)
        hooks.closed.append(self._closed)

    def __len__(self) -> int:
        return len(self._running)

    # ---- started here

    def run(self, context_id: int, roots: Iterable[Any], retain_graph: bool, *steps: Steps) -> None:
        """See ``dist_autograd.backward``.

        Args:
            steps: the steps of optimizers that other workers perform at the end of their parts.
        """
        context = self._contexts.get(context_id)
        tensors = checked(list(roots))
        if this_thread.must_not_block is not None:
            raise BlockingCallError(this_thread.must_not_block)
        with spans.span("distributed backward", roots=len(tensors)):
            key = (self._contexts.incarnation, next(self._numbers))
            own = WorkerPass(context, bool(retain_graph), self._models)
            root = Root(key, own, self._workers.own, self._messages, self._workers.by_incarnation, *steps)
            try:
                self._running[key] = root
                if context.over:
                    root.fail(self._over_error(context))
                root.run(tensors)
            finally:
                self._running.pop(key, None)

    # ---- started by other workers

    def _mark_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        asked = kinds.read_request(frame)
        running = self._participant(peer, asked, whole=False)
        if running is not None:
            self._enter(running)
        request = Request(peer, frame)
        return self._requests.accept(request, lambda request: self._mark(request, running, asked))

    def _mark(self, request: Request, running: Participant | None, asked: PartRequest) -> None:
        peer, call_id = request.peer, request.frame.call_id
        try:
            if running is None:
                raise self._over(peer, asked)
            found = running.own.mark(asked.marks, peer)
        except BaseException as error:
            self._answers.fail(peer, call_id, error)
        else:
            reply = Payload({"marks": [list(mark) for mark in found]}, [])
            self._answers.answer(peer, Kind.REPLY, call_id, reply)

    def _part_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        task = self._begun(peer, frame, whole=False)
        try:
            if self._threads is None:
                self._threads = Executor(_THREADS, "farcall-backward")
            self._threads.submit_at_once(task)
        except RuntimeError as error:
            return self._without_thread, (task, str(error))
        return None

    def _without_thread(self, refused: tuple[Task, str]) -> None:
        """Answer the start of a part that no thread can run. It must not wait for one: other workers wait for
        this part.
        """
        (function, argument), reason = refused
        if isinstance(argument[0], Participant):
            worker = self._workers.own.name
            text = f"worker '{worker}' has no thread for its part of a distributed backward: {reason}"
            self._fail(argument[0], lambda: AutogradError(text))
        function(argument)

    def _begun(self, peer: Peer, frame: Frame, *, whole: bool) -> Task:
        """Handle the start of a part; returns the task that runs it."""
        asked = kinds.read_request(frame)
        running = self._participant(peer, asked, whole=whole)
        if running is None:
            return self._refuse, (peer, frame.call_id, self._over(peer, asked))
        if asked.message is not None:
            running.own.arrived(asked.message, peer, frame)
        self._enter(running)
        if running.own.progress.on(Event.BEGIN) is not Action.START:
            return self._refuse, (peer, frame.call_id, AutogradError("it is over, or has begun already"))
        if asked.optimizer is not None:
            running.step = partial(self._step, asked.optimizer, asked.context_id)
        return self._run_part, (running, frame.call_id, asked.marks)

    def _participant(self, root: Peer, asked: PartRequest, *, whole: bool) -> Participant | None:
        """Return this worker's part of a backward pass, known or new; None if its context is over, or it has
        failed already.
        """
        key = (root.incarnation, asked.number)
        running = self._running.get(key)
        if isinstance(running, Participant):
            return running
        context = self._contexts.find(asked.context_id)
        if context is None or running is not None or key in self._failed:
            return None
        own = WorkerPass(context, asked.retain_graph, self._models)
        return Participant(key, own, root, self._messages, whole=whole)

    def _enter(self, running: Participant) -> None:
        if running.key not in self._running:
            if not running.whole:  # otherwise it is a task from now on
                self._activity.postponed.begin()
            self._running[running.key] = running
        context, failed = running.own.context, self._failed.get(running.key)
        # Since it was looked for: what ends it on another thread may not have seen it.
        if context.over:
            self._fail(running, self._over_error(context))
        elif failed is not None:
            self._fail(running, failed)

    def _over(self, root: Peer, asked: PartRequest) -> BaseException:
        """Return the error for a message about a pass that is over, or whose context is."""
        failed = self._failed.get((root.incarnation, asked.number))
        return self._contexts.unknown(asked.context_id) if failed is None else failed()

    def _refuse(self, part: tuple[Peer, int, BaseException]) -> None:
        self._answers.fail(*part)

    def _run_part(self, part: tuple[Participant, int, list[Any]]) -> None:
        run, border = self._run_and_answer, self._requests.border
        (border.answering(run, run) if border.encloses else run)(*part)

    def _run_and_answer(
        self, running: Participant, call_id: int, marks: list[Any], failure: BaseException | None = None
    ) -> None:
        kind = Kind.REPLY
        try:
            if failure is not None:
                raise failure
            with spans.span("part of a distributed backward", source=running.peer.name, call=call_id):
                payload = running.run(marks)
        except BaseException as error:
            kind = Kind.FAILURE
            serializer, name, peer = self._serializer, self._workers.own.name, running.peer
            payload = serializer.dump_exception(error, name, peer, codec=peer.codec.id)
        if running.own.progress.on(Event.END) is Action.FORGET:
            self._forget(running)
        self._answers.answer(running.peer, kind, call_id, payload)
        self._executor.lend(running.peer.reader, at_once=False)

    def _forget(self, running: Participant) -> None:
        if self._running.pop(running.key, None) is not None and not running.whole:
            self._activity.postponed_ended()

    def _abort_arrived(self, peer: Peer, frame: Frame) -> None:
        number, reason = kinds.read_abort(frame)
        text = f"the backward was given up by worker '{peer.name}': {reason[:_LONGEST]}"
        self._fail_early((peer.incarnation, number), lambda: AutogradError(text))

    # ---- both

    def _gradients_arrived(self, peer: Peer, frame: Frame) -> None:
        key, message = kinds.read_gradients(frame)
        running = self._running.get(key)
        if running is None:  # it has failed in the meantime
            return
        try:
            running.own.arrived(message, peer, frame)
        except Exception as error:
            if not is_violation(error):  # the pass would wait for them
                what = f"gradients from worker '{peer.name}' could not be taken in"
                text = f"{what}: {type(error).__name__}: {error}"
                self._fail_early(key, lambda: AutogradError(text))
            raise

    def _fail_early(self, key: Key, error: Error) -> None:
        """End a pass, also if its mark or its start has not arrived yet."""
        if key[0] != self._contexts.incarnation:
            self._failed[key] = error
            if len(self._failed) > _REMEMBERED:
                self._failed.pop(next(iter(self._failed)), None)
        running = self._running.get(key)
        if running is not None:
            self._fail(running, error)

    def _fail(self, running: Root | Participant, error: Error) -> None:
        if running.fail(error) is Action.FORGET and isinstance(running, Participant):
            self._forget(running)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        for running in self._running.copy().values():
            if running.peer is peer:
                self._fail(running, lambda: peer.lost_error("Its backward is over"))
            else:  # it may wait for gradients of that worker
                running.own.progress.on(Event.NEWS)

    def _awaited(self) -> list[Peer]:
        """Return the workers that passes of this worker wait for."""
        found: list[Peer] = []
        for running in self._running.copy().values():
            found += (running.peer, *running.own.awaited)
        return found

    def _context_over(self, context: Context) -> None:
        """End the backward passes of a context that is over."""
        for running in self._running.copy().values():
            if running.own.context is context:
                self._fail(running, self._over_error(context))

    def _over_error(self, context: Context) -> Error:
        """Return what makes the error of a pass whose context is over."""
        loss = context.loss
        if loss is not None:
            return lambda: self._contexts.lost_error(context.id, loss)
        return lambda: AutogradError(f"context {context.id} was left during its backward")

    def _closed(self) -> None:
        for running in self._running.copy().values():
            self._fail(running, lambda: NotInitializedError("RPC has been shut down during a backward"))
        if self._threads is not None:
            self._threads.stop(timeout=1.0)


class Participant:
    """This worker's part of one backward pass, for its root.

    Args:
        key: id of the backward pass.
        own: the part.
        root: the worker that started the backward pass.
        messages: sends messages to others.
        whole: whether all its gradients arrive with its start, so that it waits for no worker.

    Attributes:
        step: called at the end of the part; returns whether it has performed a step. None for nothing.
    """

    step: Callable[[], bool] | None = None

    def __init__(self, key: Key, own: WorkerPass, root: Peer, messages: SentMessages, *, whole: bool) -> None:
        self.key = key
        self.own = own
        self.peer = root
        self._messages = messages
        self.whole = whole
        self._held_back: tuple[Origin, Sequence[Tensor | None], Work | None] | None = None
        """For a whole part, gradients for the root, which are sent in the answer."""

    def run(self, marks: Sequence[Any]) -> Payload:
        """Run the part; returns the answer, or raises the error that ended the backward pass.

        Args:
            marks: marks that this worker was not asked about before.
        """
        self.own.mark(marks, self.peer)
        self.own.run(self)
        if self.step is not None:
            self.own.progress.check()
            return Payload({"stepped": True} if self.step() else {}, [])
        if self._held_back is None:
            return Payload({}, [])
        origin, gradients, work = self._held_back
        if work is not None:
            work.join(gradients)
        answer = self._messages.dump(gradients, origin)
        answer.header["gradients"] = origin.message
        return answer

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        if self.whole and self.step is None and origin.source is self.peer:
            before = self._held_back
            border = self.own.context.requests.border
            work = border.work_on(gradients) if border.encloses else None
            self._held_back = origin, gradients, work
            if before is None:
                return
            origin, gradients, work = before
            if work is not None:
                work.join(gradients)
        self._messages.gradients(self.key, origin, gradients)

    def wait(self, ready: Callable[[], bool]) -> None:
        if self.whole:
            raise AutogradError(
                f"worker '{self.peer.name}' asked for a part of one message, and named others"
            )
        self.own.progress.wait(ready)

    def fail(self, error: Error) -> Action:
        """End the backward pass here; only the first error is kept."""
        return self.own.progress.on(Event.FAIL, error)
