"""Messages: how they go out, and to whom each goes that comes in.

A message goes out as one small frame, through memory that both workers share, or as its buffers lie,
whichever suits its size and its receiver.

Every frame comes in by one door, and goes to the handler of its kind: on the loop's thread, or on a thread
that has read it itself, or made the call to its own worker. What nobody but the loop may take in, such as
references, is left to it. What is to be done about a frame, such as to run a request, is a task for an
executor thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from rpc.agent.activity import Activity
from rpc.errors import ProtocolError, RpcError, SerializationError
from rpc.group.connections import SMALL_FRAME_BYTES
from rpc.group.peer import Peer
from rpc.runtime.events import Events
from rpc.runtime.interrupts import protected
from rpc.runtime.tasks import Task
from rpc.serialization.payload import EXCEPTION, Payload, Staging
from rpc.serialization.serializer import Serializer
from rpc.transport.base import INFINITE, SMALL_BYTES
from rpc.wire.frames import Frame, Kind, LargeFrame, describe, encode, encode_small

__all__ = ["Dispatcher", "KindHandler", "Sender"]

logger = logging.getLogger(__name__)

KindHandler = Callable[[Peer, Frame], Task | None]
"""Takes in a frame; may return a task for an executor thread."""

LostHandler = Callable[[Peer, int, str], object]
"""Called with the receiver of a large message that was lost, its call id, and what happened, in words."""

UnsentHandler = Callable[[Peer, int, BaseException], object]
"""Called with the receiver of a message that could not be sent, its call id, and why."""

_UNNUMBERED: Final = frozenset((Kind.ALIVE, Kind.STREAMS))
"""They belong to one connection, and are not part of the session."""

_FEW: Final = 4
"""Maximum number of entries in the header of a small frame."""


class Sender:
    """Sends the messages of one agent. From any thread.

    Args:
        share: sends a message through shared memory, if it can.
        sent_large: called with a peer and the bytes of a message that was sent on its connection.
        lose: cuts off a worker that cannot be sent what it must have.
    """

    def __init__(
        self,
        serializer: Serializer,
        events: Events,
        activity: Activity,
        share: Callable[[Peer, int, int, Payload, float], bool],
        sent_large: Callable[[Peer, int], object],
        lose: Callable[[Peer, str], object],
    ) -> None:
        self._serializer = serializer
        self._events = events
        self._activity = activity
        self._lose = lose
        self._unsent_handlers: dict[int | None, UnsentHandler] = {}
        self._share = share
        self._sent_large = sent_large

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
        """Send one message; if that fails, what travels beside its buffers is taken back.

        An exception that is larger than what the peer accepts goes out as its description alone.

        Args:
            wait: seconds to wait at most while too much is queued for that peer.
            coalesce: see ``Connection.send_small``.
        """
        if payload.staging is not None:
            self._send_when_staged(peer, kind, call_id, payload, payload.staging, wait)
            return
        header, buffers = payload.header, payload.buffers
        count = len(buffers)
        events = self._events
        tell = events.message_sent
        if tell is not None:
            tell(peer.name, kind, sum(map(len, buffers)), call_id)
        try:
            if not count or (count == 1 and len(buffers[0]) <= SMALL_BYTES and len(header) <= _FEW):
                frame = encode_small(kind, call_id, header, buffers, payload.codec)
                if len(frame) > SMALL_FRAME_BYTES:
                    peer.check_size(len(frame))
                peer.send_small(frame, wait, coalesce=coalesce)
            elif count == 1 or not self._share(peer, kind, call_id, payload, wait):
                pieces, size = encode(kind, call_id, header, buffers, payload.codec)
                peer.check_size(size)
                aliased = count > 1  # others may be the caller's own memory
                peer.send(pieces, size, aliased=aliased, wait=wait)
                self._sent_large(peer, size)
        except BaseException as error:
            self._serializer.take_back(header, peer)
            if EXCEPTION not in header or not isinstance(error, SerializationError | ProtocolError):
                raise
            described = self._serializer.without_exception(header, error)
            self.send(peer, kind, call_id, described, wait=wait, coalesce=coalesce)

    def on_unsent(self, kinds: Collection[int | None], handler: UnsentHandler) -> None:
        """Have ``handler`` called for messages of these kinds that were to be sent later and could not be;
        None: for requests of all kinds that have no handler.
        """
        self._unsent_handlers |= dict.fromkeys(kinds, handler)

    def _send_when_staged(
        self, peer: Peer, kind: int, call_id: int, payload: Payload, staging: Staging, wait: float
    ) -> None:
        """Send a message once copies of its tensors have been made; the thread goes on meanwhile."""
        payload.staging = None
        self._activity.postponed.begin()

        def staged(error: BaseException | None) -> None:
            try:
                if error is None:
                    self.send(peer, kind, call_id, payload, wait=wait)
                else:
                    self._serializer.take_back(payload.header, peer)
            except BaseException as raised:
                error = raised
            try:
                if error is not None:
                    self._not_sent(peer, kind, call_id, error)
            finally:
                self._activity.postponed.end()
                self._activity.ended()

        staging.when_done(staged)

    def _not_sent(self, peer: Peer, kind: int, call_id: int, error: BaseException) -> None:
        """A message could not be sent, and the thread that wanted to send it has gone on."""
        handler = self._unsent_handlers.get(kind)
        if handler is None and call_id:
            handler = self._unsent_handlers.get(None)
        if handler is not None:
            handler(peer, call_id, error)
        elif peer.lost is None:
            self._lose(peer, f"a message with tensors of a device could not be sent to it: {error}")


class Dispatcher:
    """Takes in the messages of one agent.

    Args:
        run_soon: has tasks run on executor threads.
        lose: cuts off a worker that sends what is malformed, or cannot be sent what it must have.

    Attributes:
        followed: kinds of frames behind which another most likely comes at once.
    """

    def __init__(
        self,
        serializer: Serializer,
        events: Events,
        activity: Activity,
        run_soon: Callable[[Sequence[Task]], object],
        lose: Callable[[Peer, str], object],
    ) -> None:
        self.followed: set[int] = set()
        self._events = events
        self._activity = activity
        self._brings_nothing = serializer.brings_nothing
        self._take_back = serializer.take_back
        self._run_soon = run_soon
        self._lose = lose
        self._handlers: dict[int, KindHandler] = {}
        self._any_thread: set[int] = set()
        self._lost_handlers: dict[int | None, LostHandler] = {}
        self._openers: dict[int, Callable[[Peer, Frame], Frame]] = {}

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
            ValueError: the kind has a handler.
        """
        self._check_free(kind)
        self._handlers[kind] = handler
        if any_thread:
            self._any_thread.add(kind)
        if followed:
            self.followed.add(kind)

    def on_lost(self, kinds: Collection[int | None], handler: LostHandler) -> None:
        """Have ``handler`` called for large messages of these kinds that were lost; None: for requests of all
        kinds that have no handler.
        """
        self._lost_handlers |= dict.fromkeys(kinds, handler)

    def unwrap(self, kind: int, opener: Callable[[Peer, Frame], Frame]) -> None:
        """Have frames of a kind replaced by the messages that they stand for, on any thread."""
        self._check_free(kind)
        self._openers[kind] = opener

    def _check_free(self, kind: int) -> None:
        if kind in self._handlers or kind in self._openers:
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
                    peer.large_came(frame.number)
                self._take_in(peer, frame, tasks)
        except Exception as error:
            self._refuse(peer, error)
        if tasks:
            self._run_soon(tasks)
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
                self._take_in(peer, frame, tasks)
        except Exception as error:
            frames.clear()
            self._refuse(peer, error)
        mine = tasks.pop(0) if keep and tasks else None
        if tasks:
            self._run_soon(tasks)
        if self._activity.listener is not None:
            self._activity.ended()
        return mine

    def take_bulk(self, peer: Peer, frame: LargeFrame) -> None:
        """On any thread: take in a bulk message that came on a stream of its own."""
        tasks: list[Task] = []
        try:
            self._take_in(peer, frame, tasks)
        except Exception as error:
            self._refuse(peer, error)
        if tasks:
            self._run_soon(tasks)

    def _take_in(self, peer: Peer, frame: Frame, tasks: list[Task]) -> None:
        """Take in one frame; what is to be done goes to ``tasks``. Raises if it is malformed."""
        kind = frame[0]
        events = self._events
        tell = events.message_received
        if tell is not None:
            tell(peer.name, kind, sum(map(len, frame.buffers)))
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a frame of kind {kind}, which means nothing to this worker")
        due = False
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

        It has not arrived. What comes of that is for a handler (``on_lost``); without one, the worker is cut
        off.
        """
        kind, call_id, header = describe(head)
        self._take_back(header, peer)
        what = f"a large message to worker '{peer.name}' was lost when their connection broke"
        handler = self._lost_handlers.get(kind)
        if handler is None and call_id:
            handler = self._lost_handlers.get(None)
        if handler is None:
            self._lose(peer, f"{what}, and it cannot be sent again")
        else:
            handler(peer, call_id, what)

    def _refuse(self, peer: Peer, error: Exception) -> None:
        """Whatever a malformed message makes fail, it ends this connection and nothing else."""
        if isinstance(error, RpcError):
            reason = f"it sent a malformed message: {error}"
        else:
            logger.error("a malformed message from worker '%s'", peer.name, exc_info=error)
            reason = f"it sent a malformed message ({type(error).__name__}: {error})"
        self._lose(peer, reason)
