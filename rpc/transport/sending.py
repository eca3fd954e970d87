"""The sending half of a stream connection.

Whoever has a frame tries the send lock. Who gets it writes, first what others have queued, and looks at the
queue once more after letting go; who doesn't get it only queues: nobody ever waits for the lock. What the
kernel does not take stays queued, and the loop sends it when the socket is writable; until then the
connection is *stalled*, and only the loop writes. Small frames are written without letting go of the GIL
(see ``syscalls``).

Where many calls are under way, their frames are *gathered*: they are only queued, until there are some tens,
or somebody waits for an answer, or the loop gets round to it, which has been told to. Each wake-up of the
other side, and each system call, then serves many frames.

Large messages go out in chunks (see ``rpc.chunks``). The queue never has more than one chunk; when that is
written, the next is put behind what others have queued meanwhile. A thread that sends a large message writes
no more than the beginning of it and leaves the rest to the loop.

The queue has a limit in bytes, and so have the large messages beside it: beyond it, callers with more of the
same kind wait for room in ``send``; the loop never does.

An exception may hit a thread between a write and the account of it: Ctrl-C can come after any call. Then
nobody knows how much of the frame is out. While that may be, the stream is *in doubt*, and who finds it so
when the lock is free writes no more: the connection breaks, and no other frame lands inside a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from rpc.chunks import WHOLE_BYTES, ChunkedMessage, Outgoing
from rpc.transport import syscalls
from rpc.transport.base import INFINITE, ConnectionClosed, QueueFull
from rpc.wire import chunk_prefix, chunked

__all__ = ["CAPTURE_ALL", "SendingHalf"]

CAPTURE_ALL: Final = sys.maxsize

_SMALL_BYTES: Final = 64 << 10
_PIECES_PER_WRITE: Final = 64
_GATHERED_FRAMES: Final = 32
"""So many frames are not kept waiting for more."""
_JOINED_BYTES: Final = 16 << 10
"""So little is quicker copied into one piece than written by a call that lets go of the GIL."""
_CALLER_BYTES: Final = 1 << 20
"""How much of large messages a caller's thread writes before it leaves the rest to the loop."""
_LOOP_BYTES: Final = 128 << 10
"""How much the loop writes before it looks at what it has received."""
_SLICE_SECONDS: Final = 0.5
"""A signal right before a wait does not end it: no wait is longer than this."""
_LOCK_SECONDS: Final = 1.0
"""Longer than anybody who is still there holds the send lock between two writes."""
_CHUNK_END: Final = memoryview(b"")
"""Marks in the queue where a chunk ends."""


class SendingHalf(ABC):
    """Sends frames over a connected, non-blocking stream socket.

    ``send`` and ``send_small`` may be called from any thread.

    Args:
        loop: the running loop.
        sock: connected.
        description: names the other end in logs.
        send_queue_bytes: callers of ``send`` wait while more than this is queued.
        captured_bytes: memory of the caller's, where it is no longer than this, may change as soon as
            ``send`` returns.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        description: str,
        send_queue_bytes: int,
        captured_bytes: int,
    ) -> None:
        self.description = description
        self._loop = loop
        self._socket = sock
        self._descriptor = sock.fileno()
        self._send_lock = threading.Lock()
        self._queue: deque[Any] = deque()
        self._outgoing = Outgoing(chunk_prefix, sys.maxsize)
        self._chunk_queued = False
        self._message_numbers = itertools.count()
        self._captured_bytes = captured_bytes
        self._count_lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._queued_bytes = 0
        self._outgoing_bytes = 0
        self._queue_limit = send_queue_bytes
        self._room = threading.Condition(self._count_lock)
        self._waiting_for_room = 0
        self._stalled = False
        self._flushing = False
        self._in_doubt = False
        self._writes = 0
        self._open = True
        self._write_error: OSError | None = None
        self._closing: str | None = None

    # ---- any thread

    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        if size <= _SMALL_BYTES and not last:
            self.send_small(b"".join(buffers), wait)
            return
        in_chunks = size > WHOLE_BYTES and len(buffers) > 1
        if wait and in_chunks and self._outgoing_bytes > self._queue_limit:
            self._wait_for_room(lambda: self._outgoing_bytes <= self._queue_limit, wait)
        if not self._ready(0 if in_chunks else wait):
            return
        pieces = [piece if type(piece) is bytes else memoryview(piece).cast("B") for piece in buffers]
        try:
            if last:
                self._add_last(b"".join(pieces))
            elif not in_chunks:
                if not self._send_whole(pieces, aliased):
                    self._enqueue([self._capture(piece) for piece in pieces] if aliased else pieces, size)
            else:
                message = chunked(pieces, size, next(self._message_numbers))
                if not self._send_beginning(message, aliased):
                    self._add(message, aliased)
            if self._queue or self._outgoing:
                self._drain()
        except BaseException:
            self._interrupted()
            raise

    def send_small(self, frame: bytes, wait: float, *, gather: bool = False) -> None:
        if not self._ready(wait):
            return
        try:
            if gather:
                self._gather(frame)
                return
            if not self._send_now(frame):
                self._enqueue([frame], len(frame))
            if self._queue:
                self._drain()
        except BaseException:
            self._interrupted()
            raise

    def _ready(self, wait: float) -> bool:
        """Whether there is any point in sending; waits for room in the queue if asked to."""
        if wait and self._queued_bytes > self._queue_limit:
            self._wait_for_room(lambda: self._queued_bytes <= self._queue_limit, wait)
        if not self._open:
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        # After a write error it is about to be closed: what was received before is still being read.
        return self._write_error is None

    def _gather(self, frame: bytes) -> None:
        self._enqueue([frame], len(frame))
        if len(self._queue) >= _GATHERED_FRAMES:
            self._drain()
        elif not self._flushing:
            self._flushing = True
            self._tell_loop(self._flush_gathered)

    def flush(self) -> None:
        if self._queue and not self._stalled:
            try:
                self._drain()
            except BaseException:
                self._interrupted()
                raise

    def _flush_gathered(self) -> None:
        """On the loop's thread."""
        self._flushing = False
        self._drain()

    def _send_now(self, frame: bytes) -> bool:
        """Whether the frame is out of the caller's hands: written, or its rest queued in its place."""
        if self._queue or not self._send_lock.acquire(False):
            return False
        try:
            if self._queue or not self._open or self._in_doubt:
                return False
            self._in_doubt = True
            count = (
                syscalls.send_bytes(self._descriptor, frame) if syscalls.AVAILABLE else self._write([frame])
            )
            if 0 <= count < len(frame):
                self._put_back([frame[count:]])
            self._in_doubt = False
            return count >= 0
        finally:
            self._send_lock.release()

    def _send_whole(self, buffers: Sequence[Any], aliased: bool) -> bool:
        """As ``_send_now`` for a frame of any size."""
        if self._queue or not self._send_lock.acquire(False):
            return False
        try:
            if self._queue or not self._open or self._in_doubt:
                return False
            self._in_doubt = True
            left = deque(buffers)
            self._write_all(left)
            if left:
                self._put_back([self._capture(piece) for piece in left] if aliased else left)
            self._in_doubt = False
            return True
        finally:
            self._send_lock.release()

    def _send_beginning(self, message: ChunkedMessage, aliased: bool) -> bool:
        """As ``_send_whole`` for a message in chunks, of which others are left to the loop."""
        if self._queue or self._outgoing or not self._send_lock.acquire(False):
            return False
        try:
            if self._queue or self._outgoing or not self._open or self._in_doubt:
                return False
            self._in_doubt = True
            # What would have to be copied otherwise, this thread writes as long as the kernel takes it.
            end = 0 if aliased and self._captured_bytes == CAPTURE_ALL else message.size - _CALLER_BYTES
            left: deque[Any] = deque()
            while message.unsent > max(0, end) and not left and self._write_error is None:
                if self._queue and self._write_batch() < 0:
                    break
                left.extend(self._outgoing.chunk(message))
                self._write_all(left)
            if aliased:
                left = deque(map(self._capture, left))
                message.replace(self._capture)
            if self._write_error is None:
                if left:
                    self._put_back([*left, _CHUNK_END])
                    self._chunk_queued = True
                with self._count_lock:
                    self._outgoing_bytes += message.unsent
                self._outgoing.resume(message)
            self._in_doubt = False
            return True
        finally:
            self._send_lock.release()

    def _write_all(self, pieces: deque[Any]) -> None:
        """With the send lock: write what the kernel takes of ``pieces``, and remove it.

        After a write error there is nothing left.
        """
        while pieces:
            count = self._write([pieces[index] for index in range(min(len(pieces), _PIECES_PER_WRITE))])
            if count < 0:
                pieces.clear()
            elif not count:
                return
            _discard(pieces, count)

    def _capture(self, piece: Any) -> Any:
        """The same bytes in memory that nobody else changes, unless it is too long for that."""
        return piece if type(piece) is bytes or len(piece) > self._captured_bytes else bytes(piece)

    def _put_back(self, rest: Iterable[Any]) -> None:
        """With the send lock: queue the rest of a frame before what others have queued meanwhile."""
        pieces = list(rest)
        with self._count_lock:
            self._queued_bytes += sum(map(len, pieces))
            self._queue.extendleft(reversed(pieces))

    def _enqueue(self, pieces: Iterable[Any], size: int) -> None:
        with self._count_lock:
            self._queued_bytes += size
            self._queue.extend(pieces)

    def _add(self, message: ChunkedMessage, aliased: bool) -> None:
        if aliased:
            message.replace(self._capture)
        with self._count_lock:
            self._outgoing_bytes += message.size
            self._outgoing.add(message)

    def _add_last(self, frame: bytes) -> None:
        if self._outgoing:
            self._outgoing.finish_with(frame)
        else:
            self._enqueue([frame], len(frame))

    def _drain(self) -> None:
        while (self._queue or self._outgoing) and not self._stalled and self._open:
            if not self._send_lock.acquire(False):
                return
            try:
                self._write_queue(_CALLER_BYTES)
            finally:
                self._send_lock.release()
            if self._write_error is not None:
                return

    def _write_queue(self, budget: int) -> None:
        """With the send lock: write until nothing is left, the kernel takes no more, or it is enough."""
        queue = self._queue
        if self._in_doubt:
            self._fail(OSError(errno.EINTR, "a thread was interrupted while it was writing"))
        elif self._write_error is not None:
            self._forget_queue()
        while self._open and self._write_error is None:
            if self._outgoing and not self._chunk_queued:
                self._queue_chunk()
            if not queue:
                return
            self._in_doubt = True
            taken = self._write_batch()
            self._in_doubt = False
            budget -= taken
            if taken < 0 or (budget <= 0 and (self._outgoing or self._stalled)):
                if not self._stalled:
                    self._stalled = True
                    self._tell_loop(self._watch_writable)
                return

    def _write_batch(self) -> int:
        """With the send lock, and in doubt: write some of the queue, in one system call.

        Returns:
            How many bytes were written, or -1 if the kernel takes nothing now.
        """
        queue = self._queue
        batch = [queue[index] for index in range(min(len(queue), _PIECES_PER_WRITE))]
        size = sum(map(len, batch))
        count = self._write(batch)
        if count < 0:
            return 0
        if size and not count:
            return -1
        if _discard(queue, count):
            self._chunk_queued = False
        with self._count_lock:
            self._queued_bytes -= count
            if self._waiting_for_room:
                self._room.notify_all()
        return count

    def _queue_chunk(self) -> None:
        """With the send lock: the next chunk of a large message is to be written."""
        self._in_doubt = True
        pieces = self._outgoing.next()
        self._chunk_queued = True
        with self._count_lock:
            self._queued_bytes += sum(map(len, pieces))
            self._outgoing_bytes -= sum(map(len, pieces[1:]))  # the first is none of a message
            self._queue.extend([*pieces, _CHUNK_END])
        self._in_doubt = False

    def _write(self, batch: list[Any]) -> int:
        """With the send lock: one system call; 0 when the kernel takes nothing now, -1 when it failed."""
        self._writes += 1
        if syscalls.AVAILABLE and sum(map(len, batch)) <= _JOINED_BYTES:
            data = b"".join(batch)
            count = syscalls.send_bytes(self._descriptor, data)
            if count > 0 or not data:
                return max(count, 0)
        try:
            return self._socket.sendmsg(batch)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._fail(error)
            return -1

    def _fail(self, error: OSError) -> None:
        """Send no more. What the peer sent before it broke off is still to be read, so the loop closes."""
        self._write_error = error
        self._forget_queue()
        self._tell_loop(self._write_failed)

    def _interrupted(self) -> None:
        """An exception hit this thread in the middle of ``send``: leave nothing half done."""
        self._flushing = False
        # If the lock cannot be had and nobody writes, this thread acquired it right before the exception.
        writes = self._writes
        while not self._send_lock.acquire(timeout=_LOCK_SECONDS) and writes != self._writes:
            writes = self._writes
        self._send_lock.release()
        if self._stalled:
            self._tell_loop(self._watch_writable)
        if self._write_error is not None:
            self._tell_loop(self._write_failed)
        elif self._in_doubt:
            with self._send_lock:
                self._write_queue(_CALLER_BYTES)
        else:
            self._drain()

    def _tell_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _forget_queue(self) -> None:
        with self._count_lock:
            self._queue.clear()
            self._outgoing.clear()
            self._queued_bytes = self._outgoing_bytes = 0
            self._room.notify_all()

    def _wait_for_room(self, there_is_room: Callable[[], bool], patience: float) -> None:
        deadline = monotonic() + patience
        with self._count_lock:
            self._waiting_for_room += 1
            try:
                while self._open and not there_is_room():
                    left = deadline - monotonic()
                    if left <= 0:
                        raise QueueFull(f"{self.description} does not take what is queued for it")
                    self._room.wait(min(left, _SLICE_SECONDS))
            finally:
                self._waiting_for_room -= 1

    # ---- the loop's thread

    def _watch_writable(self) -> None:
        if self._open:
            self._loop.add_writer(self._descriptor, self._writable)

    def _writable(self) -> None:
        if not self._send_lock.acquire(False):
            return  # somebody looks at the queue right now; the event comes again
        try:
            self._write_queue(_LOOP_BYTES)
            if not self._queue and not self._outgoing:
                self._stalled = False
                self._loop.remove_writer(self._descriptor)
        finally:
            self._send_lock.release()
        if self._queue or self._outgoing:
            self._drain()
        elif self._closing is not None:
            self.close(self._closing)

    @abstractmethod
    def _write_failed(self) -> None:
        """Nothing can be written any more."""

    @abstractmethod
    def close(self, reason: str, *, flush: bool = False) -> None:
        """Close, telling the owner; with ``flush`` once the queue is sent."""


def _discard(pieces: deque[Any], count: int) -> bool:
    """Remove the first ``count`` bytes, and all empty pieces before what is left.

    Returns:
        Whether a chunk ended there.
    """
    chunk_ended = False
    while pieces:
        length = len(pieces[0])
        if length > count:
            if count:
                pieces[0] = memoryview(pieces[0])[count:]
            break
        count -= length
        if pieces.popleft() is _CHUNK_END:
            chunk_ended = True
    return chunk_ended
