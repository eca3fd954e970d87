"""The two ends of bulk streams: threads that write messages to sockets, and threads that read them.

``BulkQueue`` has the messages to one peer that go over streams. Each of its streams takes the next piece of a
message when it has written the last one. A thread that has had nothing to do for a while ends, and is started
again when needed. ``StreamReader`` reads one stream: it waits for a header, finds the memory for the bytes,
and receives them there. While nothing arrives, the loop watches the socket and no thread waits.

A stream has the frames ``OPENING`` and ``CHUNK`` (``rpc.wire.chunking``). A message of the kind ``BULK`` is
opened on the stream of its first chunk, since the receiver orders such messages by number. Others are opened
on the connection, behind what was sent before them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from rpc.errors import ProtocolError, is_violation
from rpc.runtime.blocking import Condition, wait_while
from rpc.transport.bulk_socket import BulkSocket
from rpc.wire.chunking import ChunkedMessage
from rpc.wire.frames import (
    PREFIX_BYTES,
    Kind,
    LargeFrame,
    chunk_prefix,
    encode_small,
    large_frame,
    read_prefix,
)
from rpc.wire.reassembly import ArrivingMessage, Reassembly, allocate
from rpc.wire.targets import MergingTarget

__all__ = ["BulkQueue", "Loop", "StreamReader"]

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 4 << 20
"""Number of bytes of a message that a stream takes at a time, if other streams may take the rest."""

_SLICE_BYTES: Final = 4 << 20
"""Maximum number of bytes in one system call, after which memory can be taken back."""

MERGED_BYTES: Final = 512 << 10
"""Maximum number of bytes that are merged at a time. They are still in the processor's cache then, and the
kernel receives the next ones meanwhile.
"""

_MAX_OPENING_BYTES: Final = 96 << 20
"""Maximum size of an opening in bytes: the largest header, and the longest table."""

_SENT_AT_ONCE: Final = 8

LEAVING: Final = encode_small(Kind.STREAMS, 0, {}, ())
"""The last frame of a stream, which says that its sender leaves."""

IDLE_SECONDS = 5.0
"""Time in seconds without anything to do after which a thread ends."""

_NO_THREAD_SECONDS: Final = 0.1
"""Pause in seconds after the system could not start a thread."""


class Loop(Protocol):
    """The part of an event loop that streams need."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Any: ...

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> Any: ...

    def remove_reader(self, fd: int) -> bool: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Any: ...


class _Writer:
    """One stream to send over, and whether a thread writes to it."""

    def __init__(self, sock: BulkSocket) -> None:
        self.socket = sock
        self.is_running = False
        self.has_left = False


class BulkQueue:
    """The messages to one peer that go over its bulk streams. From any thread.

    Args:
        sockets: the streams, each written to by one thread.
        max_bytes: maximum number of bytes of open messages that the peer accepts; one message may always be
            open.
        queue_limit: number of unsent bytes above which callers wait.
        failed: called, on any thread, with the reason why a stream cannot be written to.
        open_first: sends the opening of a message on the connection.
        ended: called, on any thread, when a thread ends.
    """

    def __init__(
        self,
        sockets: Sequence[BulkSocket],
        max_bytes: int,
        queue_limit: int,
        *,
        failed: Callable[[str], object],
        open_first: Callable[[bytes], object],
        ended: Callable[[], object],
    ) -> None:
        self.unsent = 0
        self._max_bytes = max_bytes
        self._queue_limit = queue_limit
        self._failed, self._open_first, self._ended = failed, open_first, ended
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._more = threading.Condition(self._lock)
        self._room = Condition(self._lock)
        self._waiting: deque[ChunkedMessage] = deque()
        self._open: deque[ChunkedMessage] = deque()
        self._writers = [_Writer(sock) for sock in sockets]
        self._idle = 0
        """Number of threads that wait for something to send."""
        self._is_closed = False
        self._is_leaving = False

    def is_full(self) -> bool:
        """Whether the queue is over its limit."""
        return self.unsent > self._queue_limit and not self._is_closed

    def wait_for_room(self, deadline: float) -> bool:
        """Wait while the queue is over its limit; false if it still is at ``deadline``."""
        with self._lock:
            return wait_while(self.is_full, self._room, deadline)

    def add(self, message: ChunkedMessage) -> bool:
        """Send a message; false if nothing is sent over streams any more."""
        with self._lock:
            if self._is_closed or self._is_leaving:
                return False
            self.unsent += message.size
            self._waiting.append(message)
            self._wake(sum(-(-each.unsent // _PIECE_BYTES) for each in (*self._waiting, *self._open)))
            if self.threads or message not in self._waiting:
                return True
            self._waiting.remove(message)  # the system has no more threads
            self.unsent -= message.size
        return False

    def leave(self) -> None:
        """Send on each stream, behind all messages, that nothing more follows."""
        with self._lock:
            self._is_leaving = True
            self._wake(len(self._writers))

    def close(self) -> None:
        """Send nothing more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            dropped = [*self._open, *self._waiting]
            self._waiting.clear()
            self._open.clear()
            self.unsent = 0
            self._more.notify_all()
            self._room.notify_all()
            for writer in self._writers:
                writer.socket.shut_down()
                if not writer.is_running:
                    writer.socket.close()
        del dropped  # without the lock, as this may run code of the user's

    def abandon(self) -> None:
        """Close the sockets in a forked child."""
        self._is_closed = True
        for writer in self._writers:
            writer.socket.abandon()

    @property
    def threads(self) -> int:
        """Number of threads."""
        return sum(writer.is_running for writer in self._writers)

    def _wake(self, count: int) -> None:
        """Start or wake as many threads as are needed, as far as possible. With the lock."""
        self._more.notify(count)
        count -= self._idle
        for writer in self._writers:
            if count > 0 and not writer.is_running and not writer.has_left:
                count -= 1
                try:
                    start_new_thread(self._run, (writer,))  # does not wait for the thread to begin
                except RuntimeError:
                    return
                writer.is_running = True

    def _run(self, writer: _Writer) -> None:
        try:
            while self._send_next(writer):
                pass
        except Exception as error:
            if not self._is_closed:
                self._failed(str(getattr(error, "strerror", None) or error))
            with self._lock:
                self._end(writer)
        self._ended()

    def _end(self, writer: _Writer) -> None:
        """Record that the thread of a stream has ended, so that another may be started. With the lock."""
        writer.is_running = False
        if self._is_closed:
            writer.socket.close()

    def _send_next(self, writer: _Writer) -> bool:
        """Write what a stream sends next, and keep no reference to it; false if its thread must end, which is
        recorded then.
        """
        taken = self._next(writer)
        if taken is None:
            return False
        opening, pieces, count = taken
        if opening:
            self._open_first(opening)
        writer.socket.send(pieces)
        with self._lock:
            self.unsent = max(0, self.unsent - count)
            self._room.notify_all()
        return True

    def _next(self, writer: _Writer) -> tuple[bytes, list[Any], int] | None:
        """Return the opening that goes over the connection, or none, the pieces for the stream, and the
        number of bytes of a message in them. None if the thread must end.
        """
        with self._lock:
            while not self._is_closed:
                self._begin()
                if self._open:
                    return self._take(self._open[0])
                if self._is_leaving:
                    if writer.has_left:
                        break
                    writer.has_left = True
                    return b"", [LEAVING], 0
                self._idle += 1
                try:
                    if not self._more.wait(IDLE_SECONDS) and not self._waiting:
                        break
                finally:
                    self._idle -= 1
            self._end(writer)
        return None

    def _begin(self) -> None:
        """Begin the next messages that may be sent now. With the lock."""
        while self._waiting and len(self._open) < _SENT_AT_ONCE:
            open_bytes = sum(message.size for message in self._open)
            if self._open and open_bytes + self._waiting[0].size > self._max_bytes:
                return
            self._open.append(self._waiting.popleft())

    def _take(self, message: ChunkedMessage) -> tuple[bytes, list[Any], int]:
        """Take the next piece of an open message. With the lock."""
        count = message.unsent
        if len(self._writers) > 1 and count >= 2 * _PIECE_BYTES:
            count = _PIECE_BYTES
        head = chunk_prefix(message.number, message.size - message.unsent, count)
        opening = b""
        if not message.is_open:
            message.is_open = True
            if message.kind == Kind.BULK:
                head = message.head + head
            else:
                opening = message.head
        pieces = [head, *message.take(count)]
        if message.unsent:
            self._open.rotate(-1)
        else:
            self._open.popleft()
        return opening, pieces, count


class StreamReader:
    """Reads one stream, on a thread of its own while data arrives. On the loop's thread.

    Args:
        loop: watches the socket meanwhile.
        sock: the stream.
        arriving: reassembles the messages.
        opened: called, on the reading thread, with the number and the opening of a message that begins.
        received: called there with each complete message.
        left: called there when the peer says that nothing more follows.
        failed: called there when nothing more can be read: with whether the peer has violated the protocol,
            and the reason.
        ended: called there when a thread ends.
    """

    def __init__(
        self,
        loop: Loop,
        sock: BulkSocket,
        arriving: Reassembly,
        *,
        opened: Callable[[int, memoryview], object],
        received: Callable[[LargeFrame], object],
        left: Callable[[], object],
        failed: Callable[[bool, str], object],
        ended: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._arriving = arriving
        self._opened = opened
        self._received, self._left, self._failed, self._ended = received, left, failed, ended
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._scratch: memoryview | None = None
        """Memory for what is merged, while a thread reads."""
        self._lock = threading.Lock()
        self.is_running = False
        """Whether a thread reads."""
        self._is_watched = False
        self._is_closed = False
        self._lacked_thread = False

    def watch(self) -> None:
        """Start reading when data arrives."""
        if not self._is_closed and not self.is_running and not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._socket.descriptor, self._start)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._socket.descriptor)

    def _start(self) -> None:
        self._unwatch()
        self.is_running = True
        try:
            start_new_thread(self._run, ())
        except RuntimeError as error:  # the system has no more threads just now
            self.is_running = False
            if not self._lacked_thread:
                self._lacked_thread = True
                logger.warning("large messages wait for a thread that reads them: %s", error)
            self._loop.call_later(_NO_THREAD_SECONDS, self.watch)

    def close(self) -> None:
        """Read nothing more."""
        self._unwatch()
        with self._lock:
            self._is_closed = True
            self._socket.shut_down()
            if not self.is_running:
                self._socket.close()

    def abandon(self) -> None:
        """Close the socket in a forked child."""
        self._is_closed = True
        self._socket.abandon()

    def _run(self) -> None:
        goes_on = True
        try:
            self._socket.begin_receiving()
            while goes_on and self._socket.wait_readable(IDLE_SECONDS):
                goes_on = self.read()
            self._scratch = None
        except Exception as error:
            goes_on = False
            if not self._is_closed:
                self._failed(is_violation(error), str(error))
        with self._lock:
            self.is_running = False
            if self._is_closed:
                self._socket.close()
            elif goes_on:
                self._tell_loop(self.watch)
        self._ended()

    def _tell_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(callback)

    def read(self) -> bool:
        """Read one frame, on the thread that reads; false if it is the last."""
        self._fill(self._prefix)
        kind, number, length, offset = read_prefix(self._prefix)
        if kind == Kind.OPENING:
            if length > _MAX_OPENING_BYTES:
                raise ProtocolError(f"an opening of {length} bytes")
            opening = memoryview(bytearray(length))
            self._fill(opening)
            self._opened(number, opening)
            return True
        if kind == Kind.CHUNK:
            whole = self._read_chunk(number, offset, length)
            if whole is not None:
                self._received(large_frame(number, whole))
            return True
        if bytes(self._prefix) != LEAVING:
            raise ProtocolError(f"a frame of kind {kind} on a stream")
        self._left()
        return False

    def _read_chunk(self, number: int, offset: int, length: int) -> tuple[Any, list[memoryview]] | None:
        arriving = self._arriving
        arriving.wait_for(number)
        message = arriving.begin(number, offset, length, on_stream=True)
        end = offset + length
        if message.merging is not None:
            self._merge(message, message.merging, offset, end)
            return arriving.filled(number, length)
        while offset < end:
            with message.writing():
                if message.is_dropped:
                    raise ConnectionError("the connection has ended")
                offset += self._socket.receive(message.room(offset, min(end - offset, _SLICE_BYTES)))
        return arriving.filled(number, length)

    def _merge(self, message: ArrivingMessage, target: MergingTarget, offset: int, end: int) -> None:
        """Read a chunk of a message and merge it, slice by slice."""
        if self._scratch is None:
            self._scratch = allocate(MERGED_BYTES)
        if offset < message.merged_from:
            count = min(end, message.merged_from) - offset
            self._fill(message.room(offset, count))
            offset += count
        while offset < end:
            view = self._scratch[: end - offset]
            self._fill(view)
            target.merge(offset - message.merged_from, view)
            offset += len(view)

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            filled += self._socket.receive(view[filled:])
