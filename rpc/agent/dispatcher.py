"""Messages: how they go out, and to whom each goes that comes in.

A message goes out as one small frame, through memory that both workers share, or as its buffers lie,
whichever suits its size and its receiver.

Of what comes in, a request goes to the executor, where the runner runs it; a reply to whoever waits for it;
any other frame to the handler of its kind. Every frame comes in by one door: on the loop's thread, or on a
thread that has read it itself, or made the call to its own worker. What nobody but the loop may take in, such
as references, is left to it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Final

from rpc.agent.ports import Dispatching
from rpc.agent.request_runner import Request
from rpc.errors import MessageLostError, ProtocolError, RpcError, SerializationError
from rpc.group.connections import SMALL_FRAME_BYTES
from rpc.group.peer import Peer
from rpc.runtime.events import MessageReceived, MessageSent, RequestBegun
from rpc.runtime.interrupts import protected
from rpc.runtime.tasks import COMPLETION, Task
from rpc.serialization.payload import EXCEPTION, Arrivals, Payload
from rpc.transport.base import INFINITE, SMALL_BYTES
from rpc.wire.frames import Frame, Kind, LargeFrame, describe, encode, encode_small

__all__ = ["Dispatcher", "KindHandler"]

logger = logging.getLogger(__name__)

KindHandler = Callable[[Peer, Frame], Task | None]
"""Takes in a frame; may return a task for an executor thread."""

_OWN_KINDS: Final = frozenset((Kind.CALL, Kind.REPLY, Kind.FAILURE))

_UNNUMBERED: Final = frozenset((Kind.ALIVE, Kind.STREAMS))
"""They belong to one connection, and are not part of the session."""

_FEW: Final = 4
"""A header of more entries is not taken to be small."""


class Dispatcher:
    """Sends and takes in the messages of one agent.

    Args:
        agent: see ``Dispatching``.
        run: runs a request, on an executor thread.
        cancellable: where calls are entered, before they run.

    Attributes:
        followed: kinds of frames behind which another most likely comes at once.
        requests_begun: how many requests were ever taken in; of several simultaneous ones, some may be
            counted late.
    """

    def __init__(
        self,
        agent: Dispatching,
        run: Callable[[Request], None],
        cancellable: dict[tuple[Peer, int], Request],
    ) -> None:
        self.followed: set[int] = set()
        self.requests_begun = 0
        self._agent = agent
        self._events = agent.events
        self._activity = agent.activity
        self._brings_nothing = agent.serializer.brings_nothing
        self._run = run
        self._cancellable = cancellable
        self._handlers: dict[int, KindHandler] = {}
        self._any_thread: set[int] = set(_OWN_KINDS)
        self._lost_handlers: dict[int, Callable[[Peer, int], object]] = {}
        self._openers: dict[int, Callable[[Peer, Frame], Frame]] = {}
        self._numbers = itertools.count(1)

    @protected
    def send(
        self,
        peer: Peer,
        kind: int,
        call_id: int,
        payload: Payload,
        *,
        wait: float = INFINITE,
        coalesce: bool = False,
    ) -> None:
        """Send one message, from any thread; if that fails, what travels beside its buffers is taken back.

        An exception that is larger than what the peer accepts goes out as its description alone.

        Args:
            wait: seconds to wait at most while too much is queued for that peer.
            coalesce: see ``Connection.send_small``.
        """
        header, buffers = payload.header, payload.buffers
        count = len(buffers)
        events = self._events
        if events.message_sent:
            events.tell(events.message_sent, MessageSent(peer.name, kind, sum(map(len, buffers))))
        try:
            if not count or (count == 1 and len(buffers[0]) <= SMALL_BYTES and len(header) <= _FEW):
                frame = encode_small(kind, call_id, header, buffers, payload.codec)
                if len(frame) > SMALL_FRAME_BYTES:
                    peer.check_size(len(frame))
                peer.send_small(frame, wait, coalesce=coalesce)
            elif count == 1 or not self._agent.share(peer, kind, call_id, payload, wait):
                pieces, size = encode(kind, call_id, header, buffers, payload.codec)
                peer.check_size(size)
                aliased = count > 1  # others may be the caller's own memory
                peer.send(pieces, size, aliased=aliased, wait=wait)
                self._agent.bulk_streams.consider(peer, size)
        except BaseException as error:
            self._agent.serializer.take_back(header, peer)
            if EXCEPTION not in header or not isinstance(error, SerializationError | ProtocolError):
                raise
            described = self._agent.serializer.without_exception(header, error)
            self.send(peer, kind, call_id, described, wait=wait, coalesce=coalesce)

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
        self._check_free(kind)
        self._handlers[kind] = handler
        if any_thread:
            self._any_thread.add(kind)
        if followed:
            self.followed.add(kind)

    def on_lost(self, kind: int, handler: Callable[[Peer, int], object]) -> None:
        """Have ``handler`` called with the call ids of large messages of a kind that were lost."""
        self._lost_handlers[kind] = handler

    def unwrap(self, kind: int, opener: Callable[[Peer, Frame], Frame]) -> None:
        """Have frames of a kind replaced by the messages that they stand for, on any thread."""
        self._check_free(kind)
        self._openers[kind] = opener

    def _check_free(self, kind: int) -> None:
        if kind in _OWN_KINDS or kind in self._handlers or kind in self._openers:
            raise ValueError(f"message kind {kind} is taken")

    # ---- messages that have come

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        """On the loop's thread: take in frames of one worker, in order."""
        tasks: list[Task] = []
        try:
            for frame in frames:
                opener = self._openers.get(frame[0])
                frame = frame if opener is None else opener(peer, frame)  # noqa: PLW2901
                if type(frame) is LargeFrame and frame.kind != Kind.BULK:  # whose credit says that it is here
                    self._agent.large_came(peer, frame)
                    if frame.kind in _OWN_KINDS:
                        peer.session.expect_large()
                kind, header = frame[0], frame[2]
                adopted = header and kind in _OWN_KINDS  # the handlers of other kinds do that themselves
                arrivals = self._agent.serializer.adopt(header, peer) if adopted else None
                self._take_in(peer, frame, arrivals, tasks)
        except Exception as error:
            self._refuse(peer, error)
        if tasks:
            self._agent.run_soon(tasks)
        if self._activity.listener is not None:  # whom it interests that this worker may have become idle
            self._activity.ended()

    def take_inline(self, peer: Peer, frames: list[Frame], *, keep: bool = False) -> Task | None:
        """On any thread: see ``Receiver.take_inline``."""
        tasks: list[Task] = []
        try:
            while frames:
                try:
                    frame = frames.pop(0)
                except IndexError:  # the loop has taken over
                    break
                kind = frame[0]
                if kind in self._openers:
                    frame = self._openers[kind](peer, frame)
                    kind = frame[0]
                header = frame[2]
                if kind not in self._any_thread or (header and not self._brings_nothing(header)):
                    frames.insert(0, frame)
                    break
                self._take_in(peer, frame, None, tasks)
        except Exception as error:
            frames.clear()
            self._refuse(peer, error)
        mine = tasks.pop(0) if keep and tasks else None
        if tasks:
            self._agent.run_soon(tasks)
        if self._activity.listener is not None:
            self._activity.ended()
        return mine

    def take_bulk(self, peer: Peer, frame: LargeFrame) -> None:
        """On any thread: take in a bulk message that came on a stream of its own."""
        tasks: list[Task] = []
        try:
            self._take_in(peer, frame, None, tasks)
        except Exception as error:
            self._refuse(peer, error)
        if tasks:
            self._agent.run_soon(tasks)

    def _take_in(self, peer: Peer, frame: Frame, arrivals: Arrivals | None, tasks: list[Task]) -> None:
        """Take in one frame; what is to be done goes to ``tasks``. Raises if it is malformed."""
        kind = frame[0]
        events = self._events
        if events.message_received:
            size = sum(map(len, frame.buffers))
            events.tell(events.message_received, MessageReceived(peer.name, kind, size))
        due = False
        if kind == Kind.CALL:
            due = peer.session.take_in()
            request = self._cancellable[peer, frame[1]] = Request(peer, frame, arrivals)
            self.accept(request, self._run, tasks)
        elif kind == Kind.REPLY or kind == Kind.FAILURE:
            due = peer.session.take_in()
            call = self._agent.calls.answered(frame[1], peer)
            if call is not None:
                call.arrivals = arrivals
                if call.settle(frame) and call.future is not None:
                    tasks.append((call.future.complete, COMPLETION))
        else:
            handler = self._handlers.get(kind)
            if handler is None:
                raise ProtocolError(f"a frame of kind {kind}, which means nothing to this worker")
            if kind in _UNNUMBERED or type(frame) is LargeFrame:
                peer.session.take_in_heartbeat()
            else:
                due = peer.session.take_in()
            task = handler(peer, frame)
            if task is not None:
                tasks.append(task)
        if due:
            peer.acknowledge()

    def message_lost(self, peer: Peer, head: bytes) -> None:
        """A large message to a worker was lost with its connection; ``head`` is prefix, table and header.

        It has not arrived, so a call that it would have begun does not run: that call ends. An answer is
        replaced by the error. Other kinds have a handler (``on_lost``), or the worker is cut off.
        """
        kind, call_id, header = describe(head)
        self._agent.serializer.take_back(header, peer)
        if kind in self._lost_handlers:
            self._lost_handlers[kind](peer, call_id)
            return
        what = f"a large message to worker '{peer.name}' was lost when their connection broke"
        if kind in (Kind.REPLY, Kind.FAILURE):
            error = MessageLostError(f"the call ran, and its answer was lost: {what}", peer.name)
            # Not here: it may have to wait for room, which this thread is to make.
            self._agent.run_soon([(lambda _: self._agent.fail(peer, call_id, error), None)])
        elif call_id:
            call = self._agent.calls.answered(call_id, peer)
            error = MessageLostError(f"the call did not run: {what}. It can be made again", peer.name)
            if call is not None and call.settle(error) and call.future is not None:
                self._agent.run_soon([(call.future.complete, COMPLETION)])
        else:
            self._agent.lose(peer, f"{what}, and it cannot be sent again")

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
        """Have ``run`` run a request, which must be answered once, when all that travelled beside its buffers
        is ready: at once by a task that is put among ``tasks``, or later.
        """
        agent, events = self._agent, self._events
        self.requests_begun = next(self._numbers)
        if events.request_begun:
            begun = RequestBegun(request.peer.name, request.frame.call_id)
            events.tell(events.request_begun, begun)
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
