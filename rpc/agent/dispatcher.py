"""What comes in: each frame goes to whom it concerns.

A request goes to the executor, where the runner runs it; a reply to whoever waits for it; any other frame to
the handler of its kind. Every frame comes in by one door: on the loop's thread, or on a thread that has read
it itself, or made the call to its own worker. What nobody but the loop may take in, such as references, is
left to it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rpc.agent.ports import Dispatching
from rpc.agent.request_runner import Request
from rpc.errors import ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.runtime.events import MessageReceived, RequestBegun
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Arrivals
from rpc.wire.frames import Frame, Kind

__all__ = ["Dispatcher", "KindHandler"]

logger = logging.getLogger(__name__)

KindHandler = Callable[[Peer, Frame], Task | None]
"""Takes in a frame; may return a task for an executor thread."""

_OWN_KINDS: Final = frozenset((Kind.CALL, Kind.REPLY, Kind.FAILURE))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the table of message kinds."""

    handle: KindHandler
    any_thread: bool


class Dispatcher:
    """Takes in the frames of one agent.

    Args:
        agent: see ``Dispatching``.
        run: runs a request, on an executor thread.
    """

    def __init__(self, agent: Dispatching, run: Callable[[Request], None]) -> None:
        self._agent = agent
        self._run = run
        self._kinds: dict[int, _Entry] = {}
        self._openers: dict[int, Callable[[Peer, Frame], Frame]] = {}
        self.followed: set[int] = set()
        """Kinds of frames behind which another most likely comes at once."""
        self._numbers = itertools.count(1)
        self.requests_begun = 0
        """How many requests were ever taken in; of several simultaneous ones, some may be counted late."""

    # ---- the table of message kinds

    def on(
        self, kind: int, handler: KindHandler, *, any_thread: bool = False, followed: bool = False
    ) -> None:
        """Have frames of a kind passed to ``handler``. It must neither block nor run user code.

        Args:
            any_thread: it may be called on any thread, and its frames be overtaken by those that follow. The
                loop takes in those beside whose buffers something travels.
            followed: another frame most likely comes right behind.

        Raises:
            ValueError: the kind has a handler, or is the dispatcher's own.
        """
        if kind in _OWN_KINDS or kind in self._kinds or kind in self._openers:
            raise ValueError(f"message kind {kind} is taken")
        self._kinds[kind] = _Entry(handler, any_thread)
        if followed:
            self.followed.add(kind)

    def unwrap(self, kind: int, opener: Callable[[Peer, Frame], Frame]) -> None:
        """Have frames of a kind replaced by the messages that they stand for, on any thread."""
        if kind in _OWN_KINDS or kind in self._kinds or kind in self._openers:
            raise ValueError(f"message kind {kind} is taken")
        self._openers[kind] = opener

    # ---- frames that have come

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        """On the loop's thread: take in frames of one worker, in order."""
        tasks: list[Task] = []
        try:
            for frame in frames:
                opener = self._openers.get(frame[0])
                frame = frame if opener is None else opener(peer, frame)  # noqa: PLW2901
                kind, header = frame[0], frame[2]
                adopted = header and kind in _OWN_KINDS  # the handlers of other kinds do that themselves
                arrivals = self._agent.serializer.adopt(header, peer) if adopted else None
                self._take_in(peer, frame, arrivals, tasks)
        except Exception as error:
            self._refuse(peer, error)
        if tasks:
            self._agent.run_soon(tasks)
        self._agent.something_ended()

    def take_inline(self, peer: Peer, frames: list[Frame], *, keep: bool = False) -> Task | None:
        """On any thread: take frames in from the front of the list, removing them, up to the first that needs
        the loop.

        Args:
            keep: the thread wants something to do, which is returned, if there is anything.
        """
        tasks: list[Task] = []
        try:
            while frames:
                try:
                    frame = frames.pop(0)
                except IndexError:  # the loop has taken over
                    break
                if frame[0] in self._openers:
                    frame = self._openers[frame[0]](peer, frame)
                if self._needs_loop(frame[0], frame[2]):
                    frames.insert(0, frame)
                    break
                self._take_in(peer, frame, None, tasks)
        except Exception as error:
            frames.clear()
            self._refuse(peer, error)
        mine = tasks.pop(0) if keep and tasks else None
        if tasks:
            self._agent.run_soon(tasks)
        self._agent.something_ended()
        return mine

    def _needs_loop(self, kind: int, header: dict[str, Any]) -> bool:
        if kind not in _OWN_KINDS:
            entry = self._kinds.get(kind)
            if entry is None or not entry.any_thread:
                return True
        return bool(header) and not self._agent.serializer.brings_nothing(header)

    def _take_in(self, peer: Peer, frame: Frame, arrivals: Arrivals | None, tasks: list[Task]) -> None:
        """Take in one frame; what is to be done goes to ``tasks``. Raises if it is malformed."""
        kind = frame[0]
        events = self._agent.events
        if events.message_received:
            size = sum(map(len, frame.buffers))
            events.tell(events.message_received, MessageReceived(peer.name, kind, size))
        if kind == Kind.CALL:
            self.accept(Request(peer, frame, arrivals), self._run, tasks)
        elif kind == Kind.REPLY or kind == Kind.FAILURE:
            self._answered(peer, frame, arrivals, tasks)
        else:
            entry = self._kinds.get(kind)
            if entry is None:
                raise ProtocolError(f"a frame of kind {kind}, which means nothing to this worker")
            task = entry.handle(peer, frame)
            if task is not None:
                tasks.append(task)

    def _answered(self, peer: Peer, frame: Frame, arrivals: Arrivals | None, tasks: list[Task]) -> None:
        calls = self._agent.calls
        call = calls.take(frame.call_id)
        if call is None:
            calls.answered_late(frame.call_id)
            return
        if call.peer is not peer:
            calls.restore(call)
            raise ProtocolError(f"an answer to a call that worker '{call.peer.name}' got")
        call.arrivals = arrivals
        if call.settle(frame) and call.future is not None:
            tasks.append((call.future.complete, None))

    def _refuse(self, peer: Peer, error: Exception) -> None:
        """Whatever a malformed message makes fail, it ends this connection and nothing else."""
        if isinstance(error, RpcError):
            reason = f"it sent a malformed message: {error}"
        else:
            logger.error("a malformed message from worker '%s'", peer.name, exc_info=error)
            reason = f"it sent a malformed message ({type(error).__name__}: {error})"
        self._agent.lose(peer, reason)

    # ---- requests

    def count_request(self) -> None:
        """A request has been taken in."""
        self.requests_begun = next(self._numbers)

    def accept(self, request: Request, run: Callable[[Request], None], tasks: list[Task]) -> None:
        """Have ``run`` run a request, which must be answered by ``reply`` or ``fail``, when all that
        travelled beside its buffers is ready.

        Args:
            tasks: where to put it if it can run now.
        """
        agent = self._agent
        self.count_request()
        if agent.events.request_begun:
            begun = RequestBegun(request.peer.name, request.frame.call_id)
            agent.events.tell(agent.events.request_begun, begun)
        task = (run, request)
        if request.arrivals is None:
            tasks.append(task)
            return
        agent.postponed.begin()

        def admit() -> None:
            agent.executor.submit(task)
            agent.postponed.end()
            agent.something_ended()

        if agent.serializer.ready(request.arrivals, admit):
            tasks.append(task)
            agent.postponed.end()
