"""Messages: how they are sent, and which handler takes each received one.

A message is sent as one small frame, through memory that both workers share, or as separate buffers,
whichever suits its size and its receiver.

Every received frame goes to the handler of its kind: on the loop's thread, or on a thread that has read it
itself, or made the call to its own worker. Frames that only the loop may handle, such as those with
references, are left to it. Further work for a frame, such as running a request, is a task for an executor
thread.

A message that violates the protocol ends its sender's connection. Handlers and decoders report a violation
by an ``RpcError``, mostly a ``ProtocolError``. Any other exception is this worker's own: it lacks memory,
threads or file descriptors, or has a defect. Then the call that the message belongs to fails, and the
connection is used further. A message that belongs to no call must not be lost, since others wait for what it
says: if resources are lacking, it is handled again later. If that does not succeed either, or for another
reason, its sender is cut off, which is told that this worker has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from rpc.agent.activity import Activity
from rpc.errors import ProtocolError, SerializationError, is_violation
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
"""Handles a frame; may return a task for an executor thread."""

LostHandler = Callable[[Peer, int, str], object]
"""Called with the receiver of a large message that was lost, its call id, and a description."""

UnsentHandler = Callable[[Peer, int, BaseException], object]
"""Called with the receiver of a message that could not be sent, its call id, and why."""

FailedHandler = Callable[[Peer, int, Exception], object]
"""Called with the sender of a message that could not be handled, its call id, and why."""

_UNNUMBERED: Final = frozenset((Kind.ALIVE, Kind.STREAMS))
"""Kinds of frames that belong to one connection, and are not part of the session."""

_WITHOUT_CALL: Final = frozenset(
    (Kind.ALIVE, Kind.ARRIVED, Kind.IN_SEGMENT, Kind.BULK, Kind.BULK_CREDIT, Kind.BULK_CLOSE)
)
"""Kinds of frames whose call id is another number."""

_LACKING: Final = (MemoryError, OSError, RuntimeError)
"""What is raised for want of memory, file descriptors or threads."""

_PAUSE_SECONDS: Final = 0.1
"""Time in seconds after which a message is handled again that could not be."""

_ATTEMPTS: Final = 50
"""Number of attempts to handle a message, after which its sender is cut off."""

_FEW: Final = 4
"""Maximum number of entries in the header of a small frame."""


class Sender:
    """Sends the messages of one agent. From any thread.

    Args:
        share: sends a message through shared memory, if possible.
        sent_large: called with a peer and the size in bytes of a message that was sent on its connection.
        lose: cuts off a worker to which a necessary message cannot be sent.
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
        """Send one message; if that fails, objects beside its buffers are taken back.

        An exception that is larger than the peer accepts is replaced by its description.

        Args:
            wait: maximum time in seconds to wait while the queue for that peer is full.
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
                aliased = count > 1  # the other buffers may be the caller's own memory
                peer.send(pieces, size, aliased=aliased, wait=wait)
                self._sent_large(peer, size)
        except BaseException as error:
            self._serializer.take_back(header, peer)
            if EXCEPTION not in header or not isinstance(error, SerializationError | ProtocolError):
                raise
            described = self._serializer.without_exception(header, error)
            self.send(peer, kind, call_id, described, wait=wait, coalesce=coalesce)

    def on_unsent(self, kinds: Collection[int | None], handler: UnsentHandler) -> None:
        """Register ``handler`` for messages of these kinds that were to be sent later and could not be; None:
        for requests of all kinds without a handler.
        """
        self._unsent_handlers |= dict.fromkeys(kinds, handler)

    def _send_when_staged(
        self, peer: Peer, kind: int, call_id: int, payload: Payload, staging: Staging, wait: float
    ) -> None:
        """Send a message once copies of its tensors have been made, unless its call has ended by then; the
        thread continues in the meantime.
        """
        payload.staging = None
        self._activity.postponed.begin()

        def staged(error: BaseException | None) -> None:
            try:
                if error is None and (staging.is_wanted is None or staging.is_wanted()):
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
        """Handle that a message could not be sent, after the sending thread has continued."""
        handler = self._unsent_handlers.get(kind)
        if handler is None and call_id:
            handler = self._unsent_handlers.get(None)
        if handler is not None:
            handler(peer, call_id, error)
        elif peer.lost is None:
            self._lose(peer, f"a message with tensors of a device could not be sent to it: {error}")


class Dispatcher:
    """Handles the received messages of one agent.

    Args:
        run_soon: has tasks run on executor threads.
        lose: cuts off a worker that sends malformed messages, or to which a necessary message cannot be sent.
        later: calls a function on the loop's thread after a number of seconds.
    """

    def __init__(
        self,
        serializer: Serializer,
        events: Events,
        activity: Activity,
        run_soon: Callable[[Sequence[Task]], object],
        lose: Callable[[Peer, str], object],
        later: Callable[[float, Callable[[], object]], object],
    ) -> None:
        self._events = events
        self._activity = activity
        self._brings_nothing = serializer.brings_nothing
        self._adopt = serializer.adopt
        self._take_back = serializer.take_back
        self._run_soon = run_soon
        self._lose = lose
        self._later = later
        self._handlers: dict[int, KindHandler] = {}
        self._any_thread: set[int] = set()
        self._lost_handlers: dict[int | None, LostHandler] = {}
        self._failed_handlers: dict[int | None, FailedHandler] = {}
        self._has_logged: set[int] = set()
        """Kinds of messages of which one could not be handled, as the log says."""
        self._openers: dict[int, Callable[[Peer, Frame], Frame]] = {}

    # ---- the table of message kinds

    def on(self, kind: int, handler: KindHandler, *, any_thread: bool = False) -> None:
        """Register ``handler`` for frames of a kind. It must neither block nor run user code.

        Args:
            any_thread: whether it may be called on any thread, and its frames overtaken by later ones. Frames
                with objects beside their buffers are handled by the loop.

        Raises:
            ValueError: the kind has a handler.
        """
        self._check_free(kind)
        self._handlers[kind] = handler
        if any_thread:
            self._any_thread.add(kind)

    def on_lost(self, kinds: Collection[int | None], handler: LostHandler) -> None:
        """Register ``handler`` for large messages of these kinds that were lost; None: for requests of all
        kinds without a handler.
        """
        self._lost_handlers |= dict.fromkeys(kinds, handler)

    def on_failed(self, kinds: Collection[int | None], handler: FailedHandler) -> None:
        """Register ``handler`` for well-formed messages of these kinds that could not be handled; None: for
        requests of all kinds without a handler.
        """
        self._failed_handlers |= dict.fromkeys(kinds, handler)

    def unwrap(self, kind: int, opener: Callable[[Peer, Frame], Frame]) -> None:
        """Have frames of a kind replaced by the messages that they refer to, on any thread."""
        self._check_free(kind)
        self._openers[kind] = opener

    def _check_free(self, kind: int) -> None:
        if kind in self._handlers or kind in self._openers:
            raise ValueError(f"message kind {kind} is taken")

    # ---- received messages

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        """Handle frames of one worker, in order. On the loop's thread."""
        tasks: list[Task] = []
        for frame in frames:
            try:
                opener = self._openers.get(frame[0])
                frame = frame if opener is None else self._opened(opener, peer, frame)  # noqa: PLW2901
                if type(frame) is LargeFrame and frame.kind != Kind.BULK:  # those have credits
                    peer.large_came(frame.number)
                self._take_in(peer, frame, tasks)
            except Exception as error:
                if self._failed(peer, frame, error):
                    break
        if tasks:
            self._run_soon(tasks)
        if self._activity.listener is not None:  # waits for this worker to become idle
            self._activity.ended()

    def take_inline(self, peer: Peer, frames: list[Frame], *, keep: bool = False) -> Task | None:
        """See ``Receiver.take_inline``. On any thread."""
        tasks: list[Task] = []
        while frames:
            try:
                frame = frames.pop(0)
            except IndexError:  # the loop has taken over
                break
            try:
                kind = frame[0]
                if kind in self._openers:
                    frame = self._opened(self._openers[kind], peer, frame)
                    kind = frame[0]
                header = frame[2]
                if kind not in self._any_thread or (header and not self._brings_nothing(header)):
                    frames.insert(0, frame)
                    break
                self._take_in(peer, frame, tasks)
            except Exception as error:
                if self._failed(peer, frame, error):
                    frames.clear()
        mine = tasks.pop(0) if keep and tasks else None
        if tasks:
            self._run_soon(tasks)
        if self._activity.listener is not None:
            self._activity.ended()
        return mine

    def take_bulk(self, peer: Peer, frame: LargeFrame) -> None:
        """Handle a bulk message that arrived on a separate stream. On any thread."""
        tasks: list[Task] = []
        try:
            self._take_in(peer, frame, tasks)
        except Exception as error:
            self._failed(peer, frame, error)
        if tasks:
            self._run_soon(tasks)

    def _opened(self, opener: Callable[[Peer, Frame], Frame], peer: Peer, frame: Frame) -> Frame:
        """Return the message that a frame refers to."""
        try:
            return opener(peer, frame)
        except Exception as error:
            if not is_violation(error):
                peer.session.take_in()  # it is dropped, and must not be sent again
            raise

    def _take_in(self, peer: Peer, frame: Frame, tasks: list[Task]) -> None:
        """Handle one frame; further work is added to ``tasks``. Raises if the frame is malformed."""
        kind = frame[0]
        events = self._events
        tell = events.message_received
        if tell is not None:
            tell(peer.name, kind, sum(map(len, frame.buffers)))
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a frame of kind {kind}, which means nothing to this worker")
        due = False
        session = peer.session
        if kind in _UNNUMBERED or type(frame) is LargeFrame:
            session.take_in_heartbeat()
        else:  # as ``Session.take_in``, for each message
            session.received += 1
            due = session.received >= session.acknowledge_at
        task = handler(peer, frame)
        if task is not None:
            tasks.append(task)
        if due:
            peer.acknowledge()

    def message_lost(self, peer: Peer, head: bytes) -> None:
        """Handle that a large message was lost with its connection; ``head`` is prefix, table and header.

        It has not arrived. A handler (``on_lost``) deals with that; without one, the worker is cut off.
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

    def _failed(self, peer: Peer, frame: Frame, error: Exception, attempts: int = 1) -> bool:
        """Handle that a handler has raised; returns whether the sender is cut off for it."""
        kind, call_id = frame[:2]
        if is_violation(error) and attempts == 1:
            self._lose(peer, f"it sent a malformed message: {error}")
            return True
        handler = self._failed_handlers.get(kind)
        if handler is None and call_id and kind not in _WITHOUT_CALL:
            handler = self._failed_handlers.get(None)
        is_lacking = isinstance(error, _LACKING) and not is_violation(error)
        if not (is_lacking and handler is not None) and kind not in self._has_logged:
            self._has_logged.add(kind)
            text = "this worker could not handle a message of kind %d from worker '%s'"
            logger.error(text, kind, peer.name, exc_info=error)
        try:
            if handler is not None:
                self._adopt_unused(peer, frame)
                handler(peer, call_id, error)
                return False
            if kind in _UNNUMBERED:
                return False
            if is_lacking and attempts < _ATTEMPTS:
                self._later(_PAUSE_SECONDS, partial(self._handle_again, peer, frame, attempts + 1))
                return False
        except Exception as another:
            error = another
        self._lose(peer, f"this worker could not handle a message from it: {type(error).__name__}: {error}")
        return True

    def _handle_again(self, peer: Peer, frame: Frame, attempts: int) -> None:
        """Handle a message that could not be handled. On the loop's thread."""
        if peer.lost is not None:
            return
        try:
            if frame[0] in self._openers:
                frame = self._openers[frame[0]](peer, frame)
            task = self._handlers[frame[0]](peer, frame)
            if task is not None:
                self._run_soon([task])
        except Exception as error:
            self._failed(peer, frame, error, attempts)
        if self._activity.listener is not None:
            self._activity.ended()

    def _adopt_unused(self, peer: Peer, frame: Frame) -> None:
        """Take the references from a message that will not be read, and release them: otherwise its sender
        would keep them for this worker.
        """
        if frame.header and not self._brings_nothing(frame.header):
            with suppress(SerializationError):  # the handler has taken them before it failed
                self._adopt(frame.header, peer)
