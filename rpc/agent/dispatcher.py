"""What comes in: each frame goes to whom it concerns.

A request goes to the executor, where the callee runs it; a reply to whoever waits for it; any other frame
to the handler of its kind. All on the loop's thread, except for calls to oneself with nothing beside their
pickle, which come in on the sender's, and for what a thread has read itself (see ``transport/role.py``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rpc.agent.request_runner import Request
from rpc.errors import ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.runtime.executor import Task
from rpc.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from rpc.agent.agent import Agent

__all__ = ["Dispatcher", "KindHandler"]

logger = logging.getLogger(__name__)

KindHandler = Callable[[Peer, Frame], Task | None]
"""Takes in a frame; may return a task for an executor thread."""

_OWN_KINDS: Final = (Kind.CALL, Kind.REPLY, Kind.FAILURE)


class Dispatcher:
    """Takes in the frames of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._handlers: dict[int, KindHandler] = {}
        self._for_any_thread: set[int] = set()
        self.followed: set[int] = set()
        """Kinds of frames behind which another most likely comes at once."""
        self._numbers = itertools.count(1)
        self.requests_begun = 0
        """How many requests were ever taken in; of several simultaneous ones, some may be counted late."""

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        """Take in frames of one worker, in order."""
        agent = self._agent
        run, calls, adopt = agent.runner.run, agent.calls, agent.serializer.adopt
        tasks: list[Task] = []
        for frame in frames:
            kind, call_id, header, _ = frame
            try:
                if kind == Kind.CALL:
                    if not header:
                        tasks.append(self.begun(peer, frame))
                    else:
                        request = Request(peer, frame, adopt(header, peer))
                        self.accept(request, run, tasks)
                elif kind == Kind.REPLY or kind == Kind.FAILURE:
                    arrivals = adopt(header, peer) if header else None
                    call = calls.take(call_id)
                    if call is None:
                        calls.answered_late(call_id)
                    else:
                        if call.peer is not peer:
                            calls.restore(call)
                            raise ProtocolError(f"an answer to a call that worker '{call.peer.name}' got")
                        call.arrivals = arrivals
                        if call.settle(frame) and call.future is not None:
                            tasks.append((call.future.complete, None))
                else:
                    task = self._handler(kind)(peer, frame)
                    if task is not None:
                        tasks.append(task)
            except Exception as error:
                # Whatever a malformed message makes fail, it ends this connection and nothing else.
                if isinstance(error, RpcError):
                    reason = f"it sent a malformed message: {error}"
                else:
                    logger.exception("a malformed message from worker '%s'", peer.name)
                    reason = f"it sent a malformed message ({type(error).__name__}: {error})"
                if peer.is_self:  # which sends on any thread
                    agent.mailbox.call(agent.connections.lose, peer, reason)
                else:
                    agent.connections.lose(peer, reason)
                break
        if tasks:
            agent.run_soon(tasks)
        agent.something_ended()

    def count_request(self) -> None:
        """A request has been taken in, by whatever way."""
        self.requests_begun = next(self._numbers)

    def begun(self, peer: Peer, frame: Frame) -> Task:
        """Count a request that has come without anything beside its pickle; returns how to run it."""
        self.requests_begun = next(self._numbers)
        return self._agent.runner.run, Request(peer, frame)

    def is_for_any_thread(self, kind: int, header: dict[str, Any]) -> bool:
        """Whether a message may be taken in by the thread that has read it, since nothing needs the loop."""
        if kind != Kind.CALL and kind not in self._for_any_thread:
            return False
        return not header or self._agent.serializer.brings_nothing(header)

    def taken_by_thread(self, peer: Peer, frame: Frame) -> Task | None:
        """Take in such a frame on the thread that has read it; returns what is to be done, if anything.

        Raises:
            ProtocolError: it is malformed.
        """
        if frame.kind == Kind.CALL:
            return self.begun(peer, frame)
        handler = self._handlers.get(frame.kind) or self._handler(frame.kind)
        return handler(peer, frame)

    def accept(self, request: Request, run: Callable[[Request], None], tasks: list[Task]) -> None:
        """Have ``run`` run a request, which must be answered by ``reply`` or ``fail``, when all that
        travelled beside its pickle is ready.

        Args:
            tasks: where to put it if it can run now.
        """
        agent = self._agent
        self.count_request()
        task = (run, request)
        arrivals = request.arrivals
        if arrivals is None:
            tasks.append(task)
            return
        agent.postponed.begin()

        def admit() -> None:
            agent.executor.submit(task)
            agent.postponed.end()
            agent.something_ended()

        if agent.serializer.ready(arrivals, admit):
            tasks.append(task)
            agent.postponed.end()

    def _handler(self, kind: int) -> KindHandler:
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a frame of kind {kind}, which means nothing to this worker")
        return handler

    def on(
        self,
        kind: int,
        handler: KindHandler,
        *,
        any_thread: bool = False,
        followed: bool = False,
    ) -> None:
        """Have frames of a kind passed to ``handler``. It must neither block nor run user code.

        Args:
            any_thread: it may be called on any thread, and its frames be overtaken by those that follow. The
                loop takes in those beside whose pickle something travels.
            followed: another frame most likely comes right behind.

        Raises:
            ValueError: the kind has a handler, or is the dispatcher's own.
        """
        if kind in _OWN_KINDS or kind in self._handlers:
            raise ValueError(f"message kind {kind} is taken")
        self._handlers[kind] = handler
        if any_thread:
            self._for_any_thread.add(kind)
        if followed:
            self.followed.add(kind)
