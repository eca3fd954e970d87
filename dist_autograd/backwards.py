"""The backwards that this worker takes part in, and what their workers say to each other.

========= ======================= ================================================================
mark      root to a worker        these tensors of these messages take part; answered by the marks
                                  that follow from it, on whatever workers
gradients receiver to sender      the gradients of one message
part      root to a worker        the same, or no gradients yet, and all marks of a worker that was not
                                  asked by ``mark``; answered when its part is done, or has failed
done      a worker to the root    its part, that began otherwise, is done, or has failed
abort     root to a worker        the backward has failed elsewhere
========= ======================= ================================================================

Handlers run on the loop's thread. A worker's part runs on a thread of its own, which the executor of calls
does not count: it waits for other workers. A part of one message, whose gradients are there, has nothing to
wait for, and runs as a call does: on the very thread that has received it, if one stands by.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor

from dist_autograd.contexts import Context, Contexts
from dist_autograd.ddp import Models
from dist_autograd.graph import Mark
from dist_autograd.parts import Part
from dist_autograd.passes import Key, Pass
from dist_autograd.recording import Origin
from dist_autograd.root import Root, Workers, failure_of
from rpc.agent.agent import Agent
from rpc.agent.request_runner import Request
from rpc.errors import AutogradError, NotInitializedError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.executor import Executor, Task
from rpc.serialization.exceptions import text_of
from rpc.serialization.payload import Payload
from rpc.transport import SMALL_BYTES
from rpc.wire.frames import Frame, Kind

__all__ = ["Backwards"]

logger = logging.getLogger(__name__)

MARK: Final = Kind.EXTENSION + 16
GRADIENTS: Final = Kind.EXTENSION + 17
DONE: Final = Kind.EXTENSION + 18
ABORT: Final = Kind.EXTENSION + 19
PART: Final = Kind.EXTENSION + 21
"""A part whose other gradients follow, in order."""
WHOLE_PART: Final = Kind.EXTENSION + 22
"""A part of one message."""

_NONE: Final = 0
"""As the number of a message: of none."""
_THREADS: Final = 8
_GRADIENTS: Final = "the gradients of a message"


class Backwards:
    """Runs backwards, as their root and for other roots. From any thread, except where noted.

    Args:
        agent: of this worker, before it joins a group.
        contexts: of this worker.
        models: of this worker, under ``DistributedDataParallel``.
    """

    def __init__(self, agent: Agent, contexts: Contexts, models: Models) -> None:
        self._agent = agent
        self._contexts = contexts
        self._models = models
        self._passes: dict[Key, Pass] = {}
        self._roots: dict[Key, Root] = {}
        self._numbers = itertools.count(1)
        self._threads: Executor | None = None
        self._workers = Workers(self._ask, self._abort, agent.peer_by_incarnation)
        agent.on(MARK, self._mark_arrived)
        agent.on(GRADIENTS, self._gradients_arrived)
        agent.on(DONE, self._done_arrived)
        agent.on(ABORT, self._abort_arrived)
        agent.on(PART, self._part_arrived)
        agent.on(WHOLE_PART, self._part_arrived, any_thread=True)
        agent.on_gone(self._peer_gone)
        agent.on_closed(self._closed)

    def __len__(self) -> int:
        return len(self._passes)

    # ---- as the root

    def run(self, context: Context, roots: Sequence[Tensor], retain_graph: bool) -> None:
        """Run a backward from ``roots``, which have been checked; see ``dist_autograd.backward``."""
        agent = self._agent
        key = (agent.incarnation, next(self._numbers))
        own = self._new_pass(key, context, agent.own_peer, retain_graph)
        own.begun = True
        root = Root(own, self._workers)
        try:
            self._passes[key] = own
            self._roots[key] = root
            if context.over:
                own.fail(_left(context))
            root.run(roots)
        finally:
            try:
                self._passes.pop(key, None)
            finally:
                self._roots.pop(key, None)

    def _new_pass(self, key: Key, context: Context, root: Peer, retain_graph: bool) -> Pass:
        return Pass(key, context, root, retain_graph, self._post, self._read, self._models)

    def _ask(self, own: Pass, peer: Peer, marks: list[tuple[int, int]]) -> Callable[[], list[Mark]]:
        header = {"mark": [own.key[1], own.context.to_wire(), own.retain_graph, marks]}
        call = self._agent.caller.request(peer, MARK, Payload(header, []), 0, "a distributed backward")

        def answer() -> list[Mark]:
            call.wait_settled()
            outcome = call.outcome
            if isinstance(outcome, Frame) and outcome.kind == Kind.REPLY:
                return [Mark(*mark) for mark in outcome.header["marks"]]
            call.result()
            raise ProtocolError(f"worker '{peer.name}' answered a mark with a value")

        return answer

    def _abort(self, own: Pass, peer: Peer, error: BaseException) -> None:
        header = {"abort": [own.key[1], f"{type(error).__name__}: {text_of(error)}"]}
        self._send(peer, ABORT, Payload(header, []))

    def _done_arrived(self, peer: Peer, frame: Frame) -> None:
        root = self._roots.get((self._agent.incarnation, frame.header["done"]))
        if root is None:
            return  # it was over before
        if "!" in frame.header:
            root.own.fail_later(lambda: self._failure(peer, frame))
        else:
            root.done(peer)

    def _failure(self, peer: Peer, frame: Frame) -> BaseException:
        """What a worker's failure is to its root: loading the error may run code of the user's."""
        agent = self._agent
        error = agent.serializer.load_exception(frame.header, frame.buffers, None, peer)
        if isinstance(error, WorkerLostError):
            return error
        failure = failure_of(peer.member.info, error)
        failure.__cause__ = error
        return failure

    # ---- for other roots

    def _mark_arrived(self, peer: Peer, frame: Frame) -> None:
        match frame.header.get("mark"):
            case [int(number), [int(context_id), int()], bool(retain_graph), list(marks)]:
                key = (peer.incarnation, number)
            case other:
                raise ProtocolError(f"a mark that cannot be: {str(other)[:80]}")
        running = self._passes.get(key)
        if running is None:
            context = self._contexts.find(context_id)
            if context is not None:
                self._agent.postponed.begin()
                running = self._passes[key] = self._new_pass(key, context, peer, retain_graph)

        def mark(request: Request) -> None:
            try:
                if running is None:
                    self._contexts.get(context_id)
                    raise AutogradError(f"context {context_id} is just made known to this worker")
                found = running.mark(marks, peer)
            except BaseException as error:
                self._agent.fail(peer, frame.call_id, error)
            else:
                reply = Payload({"marks": [list(mark) for mark in found]}, [])
                self._agent.answer(peer, Kind.REPLY, frame.call_id, reply)

        tasks: list[Task] = []
        self._agent.dispatcher.accept(Request(peer, frame), mark, tasks)
        self._agent.executor.submit_batch(tasks)

    def _gradients_arrived(self, peer: Peer, frame: Frame) -> None:
        match frame.header.get("gradients"):
            case [int(root), int(number), int(message)]:
                running = self._passes.get((root, number))
            case other:
                raise ProtocolError(f"gradients that cannot be: {str(other)[:80]}")
        if running is None:
            return  # it has failed meanwhile
        running.arrived(message, peer, (peer, frame))
        if not running.begun and not running.waits_for_nothing:
            running.begun = True
            self._start(running)

    def _start(self, running: Pass) -> None:
        self._submit((self._run_part, running))

    def _submit(self, task: Task) -> None:
        if self._threads is None:
            self._threads = Executor(_THREADS, "farcall-backward")
        self._threads.submit(task)

    def _part_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        match frame.header.get("part"):
            case [int(number), int(message), [int(context_id), int()], bool(retain_graph), list(marks)]:
                key = (peer.incarnation, number)
            case other:
                raise ProtocolError(f"a part of a backward that cannot be: {str(other)[:80]}")
        if key in self._passes:
            raise ProtocolError("a part of a backward that has begun already")
        ended = self._contexts.are_over(frame.header.get("over", []), peer)
        context = self._contexts.find(context_id)
        if context is None:
            return self._refuse_part, (peer, frame.call_id, context_id, ended)
        running = self._new_pass(key, context, peer, retain_graph)
        if message != _NONE:
            running.arrived(message, peer, (peer, frame))
        self._agent.postponed.begin()
        self._passes[key] = running
        task = (self._run_asked_part, (running, frame.call_id, marks, ended))
        if frame.kind == WHOLE_PART:
            running.waits_for_nothing = True
            return task
        running.begun = True
        self._submit(task)
        return None

    def _refuse_part(self, part: tuple[Peer, int, int, list[Context]]) -> None:
        peer, call_id, context_id, ended = part
        for context in ended:
            context.let_go()
        try:
            self._contexts.get(context_id)
            raise AutogradError(f"context {context_id} is just made known to this worker")
        except AutogradError as error:
            self._agent.fail(peer, call_id, error)

    def _run_asked_part(self, part: tuple[Pass, int, list[Any], list[Context]]) -> None:
        running, call_id, marks, ended = part
        agent, peer = self._agent, running.root
        kind, payload = Kind.REPLY, Payload({}, [])
        running.begun = True
        try:
            running.mark(marks, peer)
            running.run()
            if running.held_back is not None:
                origin, gradients = running.held_back
                payload = agent.serializer.dump_tensors(gradients, peer, _GRADIENTS)
                payload.header["gradients"] = origin.message
        except BaseException as error:
            kind, payload = Kind.FAILURE, agent.serializer.dump_exception(error, agent.info.name, peer)
        self._forget(running)
        if peer.standby is not None:
            agent.executor.stand_by(peer.standby, at_once=False)
        agent.answer(peer, kind, call_id, payload)
        for context in ended:  # while the root goes on
            context.let_go()

    def _run_part(self, running: Pass) -> None:
        peer, done = running.root, {"done": running.key[1]}
        try:
            running.run()
        except BaseException as error:
            payload = self._agent.serializer.dump_exception(error, self._agent.info.name, peer)
            payload.header.update(done)
        else:
            payload = Payload(done, [])
        self._forget(running)
        self._send(peer, DONE, payload)

    def _forget(self, running: Pass) -> None:
        if self._passes.pop(running.key, None) is not None:
            self._agent.postponed.end()
            self._agent.something_ended()

    def _abort_arrived(self, peer: Peer, frame: Frame) -> None:
        match frame.header.get("abort"):
            case [int(number), str(reason)]:
                running = self._passes.get((peer.incarnation, number))
            case other:
                raise ProtocolError(f"an abort that cannot be: {str(other)[:80]}")
        if running is not None:
            self._end(running, AutogradError(f"the backward was given up by worker '{peer.name}': {reason}"))

    def _end(self, running: Pass, error: BaseException) -> None:
        running.fail(error)
        if not running.begun:
            running.begun = True
            self._forget(running)

    # ---- for both

    def _post(self, running: Pass, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        if running.waits_for_nothing and origin.source is running.root:
            before = running.held_back
            running.held_back = (origin, gradients)
            if before is None:
                return
            origin, gradients = before
        payload = self._agent.serializer.dump_tensors(gradients, origin.source, _GRADIENTS)
        marks = running.untold.pop(origin.source, None)
        if marks is not None:
            self._begin_part(running, origin, marks, payload)
            return
        self._send_gradients(running, origin, payload)

    def _begin_part(self, running: Pass, origin: Origin, marks: list[Mark], payload: Payload) -> None:
        """Tell a worker, with its first gradients, what takes part there.

        Others that follow may overtake these if they are large: then they go by themselves, behind.
        """
        agent, peer = self._agent, origin.source
        context, message = running.context, origin.message
        whole = {mark[1] for mark in marks} == {message}
        gradients: Payload | None = None
        if not whole and sum(map(len, payload.buffers)) > SMALL_BYTES:
            gradients, payload = payload, Payload({}, [])
        payload.header["part"] = [
            running.key[1],
            message if gradients is None else _NONE,
            [context.id, context.creator],
            running.retain_graph,
            [mark[1:] for mark in marks],
        ]
        over = self._contexts.take_unsaid(peer)
        if over:
            payload.header["over"] = over
        part = agent.calls.open(peer, "a distributed backward", 0, Part)
        part.failure_in, part.whole = self._failure, whole
        kind = WHOLE_PART if whole else PART
        try:
            self._roots[running.key].ask(
                part,
                partial(agent.caller.transmit, part, kind, payload),
                is_small=len(payload.buffers) == 1,
            )
        except BaseException:
            self._contexts.say_again(peer, over)
            raise
        if gradients is not None:
            self._send_gradients(running, origin, gradients)

    def _send_gradients(self, running: Pass, origin: Origin, payload: Payload) -> None:
        payload.header["gradients"] = [*running.key, origin.message]
        self._agent.send(origin.source, GRADIENTS, 0, payload)

    def _read(self, message: tuple[Peer, Frame]) -> Sequence[Tensor | None]:
        peer, frame = message
        return self._agent.serializer.load_tensors(frame.buffers, peer)

    def _send(self, peer: Peer, kind: int, payload: Payload) -> None:
        try:
            self._agent.send(peer, kind, 0, payload)
        except WorkerLostError as error:
            logger.debug("nobody is left to be told how a backward went: %s", error)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        for root in self._roots.copy().values():
            if peer in root.others:
                root.own.fail(peer.lost_error("The backward cannot be finished"))
        for running in self._passes.copy().values():
            if running.root is peer:
                self._end(running, peer.lost_error("Its backward is over"))

    def context_over(self, context: Context) -> None:
        """A context is released: its backwards end."""
        if not self._passes:
            return
        for running in self._passes.copy().values():
            if running.context is context:
                self._end(running, _left(context))

    def _closed(self) -> None:
        for running in self._passes.copy().values():
            self._end(running, NotInitializedError("RPC has been shut down during a backward"))
        if self._threads is not None:
            self._threads.stop(timeout=1.0)


def _left(context: Context) -> AutogradError:
    return AutogradError(f"context {context.id} was left during its backward")
