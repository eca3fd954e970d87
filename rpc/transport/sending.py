"""The sending half of a stream connection: which thread writes what.

Whoever has a frame tries the send lock. Who gets it writes, first what others have queued, and looks once
more after letting go, at the queue and at the large messages beside it, for either may have been left to it
meanwhile; who doesn't get it only queues: nobody ever waits for the lock. Small frames are written without
letting go of the GIL (see ``syscalls``). A thread that sends a large message writes no more than the
beginning of it and leaves the rest to the loop.

Where many calls are under way, their frames are *gathered*: they are only queued, until there are some tens,
or somebody waits for an answer, or the loop gets round to it, which has been told to. Each wake-up of the
other side, and each system call, then serves many frames.

What is queued, and how it gets to the socket once a thread has the lock, is ``write_queue.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from rpc.transport import syscalls
from rpc.transport.base import INFINITE, SMALL_BYTES, ConnectionClosed
from rpc.transport.write_queue import CALLER_BYTES, CAPTURE_ALL, CHUNK_END, WriteQueue
from rpc.wire.chunking import WHOLE_BYTES, ChunkedMessage
from rpc.wire.frames import chunked

__all__ = ["CAPTURE_ALL", "SendingHalf"]

_GATHERED_FRAMES: Final = 32
"""So many frames are not kept waiting for more."""
_LOOP_BYTES: Final = 128 << 10
"""How much the loop writes before it looks at what it has received."""
_LOCK_SECONDS: Final = 1.0
"""Longer than anybody who is still there holds the send lock between two writes."""


class SendingHalf(WriteQueue):
    """Sends frames over a connected, non-blocking stream socket.

    ``send`` and ``send_small`` may be called from any thread. Arguments are those of ``WriteQueue``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        description: str,
        send_queue_bytes: int,
        captured_bytes: int,
    ) -> None:
        super().__init__(loop, sock, description, send_queue_bytes, captured_bytes)
        self._message_numbers = itertools.count()
        self._flushing = False
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
        if size <= SMALL_BYTES and not last:
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
                # Not into the queue, where it would overtake what another thread has just begun to send.
                self._outgoing.finish_with(b"".join(pieces))
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
        if (self._queued_bytes or not self._open or self._write_error) and not self._ready(wait):
            return
        try:
            if gather:
                self._gather(frame)
                return
            if self._queue or not self._send_now(frame):
                self._enqueue([frame], len(frame))
            if self._queue or self._outgoing_bytes:
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
        if not self._send_lock.acquire(False):
            return False
        try:
            if self._queue or not self._open or self._in_doubt:
                return False
            if syscalls.AVAILABLE:
                counts: list[Any] = [frame]
                self._in_doubt = counts
                syscalls.send_noting(self._descriptor, frame, counts)
                count: int = counts[1]
            else:
                self._in_doubt = True
                count = self._write([frame])
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
            end = 0 if aliased and self._captured_bytes == CAPTURE_ALL else message.size - CALLER_BYTES
            left: deque[Any] = deque()
            while message.unsent > max(0, end) and not left and self._write_error is None:
                if self._queue:  # to its end: what is left of it may begin in the middle of a frame
                    if self._write_batch() < 0:
                        break
                    continue
                left.extend(self._outgoing.chunk(message))
                self._write_all(left)
            if aliased:
                left = deque(map(self._capture, left))
                message.replace(self._capture)
            if self._write_error is None:
                if left:
                    self._put_back([*left, CHUNK_END])
                    self._chunk_queued = True
                with self._count_lock:
                    self._outgoing_bytes += message.unsent
                self._outgoing.resume(message)
            self._in_doubt = False
            return True
        finally:
            self._send_lock.release()

    def _drain(self) -> None:
        while (self._queue or self._outgoing) and not self._stalled and self._open:
            if not self._send_lock.acquire(False):
                return
            try:
                self._write_queue(CALLER_BYTES)
            finally:
                self._send_lock.release()
            if self._write_error is not None:
                return

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
        else:
            if self._in_doubt:
                with self._send_lock:
                    self._write_queue(CALLER_BYTES)
            self._drain()

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
                if self._closing is None:  # else it comes here again until it is closed
                    self._loop.remove_writer(self._descriptor)
        finally:
            self._send_lock.release()
        if self._queue or self._outgoing:
            self._drain()
        elif self._closing is not None:
            self.close(self._closing)

    @abstractmethod
    def close(self, reason: str, *, flush: bool = False) -> None:
        """Close, telling the owner; with ``flush`` once the queue is sent."""
