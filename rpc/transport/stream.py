"""A connection over a stream socket that we read and write ourselves.

Sending: whoever has a frame tries the send lock. Who gets it writes, first what others have queued, and
looks at the queue once more after letting go; who doesn't get it only queues: nobody ever waits for the
lock. What the kernel does not take stays queued, and the loop sends it when the socket is writable; until
then the connection is *stalled*, and only the loop writes. Small frames are written without letting go of
the GIL (see ``syscalls``).

The queue has a limit in bytes: beyond it, callers wait for room in ``send``; the loop never does.

An exception may hit a thread between a write and the account of it: Ctrl-C can come after any call. Then
nobody knows how much of the frame is out. While that may be, the stream is *in doubt*, and who finds it so
when the lock is free writes no more: the connection breaks, and no other frame lands inside a frame.

The socket is closed under the send lock and after its reader is removed, so that no thread can write to a
descriptor number that already belongs to somebody else's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rpc.decoder import Decoder
from rpc.errors import ProtocolError
from rpc.transport import syscalls
from rpc.transport.base import CLOSED_BY_PEER, ConnectionClosed, ConnectionOwner
from rpc.wire import PREAMBLE

__all__ = ["StreamConnection"]

_SMALL_BYTES: Final = 64 << 10
_PIECES_PER_WRITE: Final = 64
_READS_PER_WAKE_UP: Final = 16
_HANDSHAKE_FRAME_BYTES: Final = 64 << 10
_LOCK_SECONDS: Final = 1.0
"""Longer than anybody who is still there holds the send lock between two writes."""


class StreamConnection:
    """Frames over a connected, non-blocking stream socket.

    ``send`` may be called from any thread, everything else on the loop's thread only.

    Args:
        loop: the running loop.
        sock: connected; the connection owns it from here on.
        description: names the other end in logs.
        send_queue_bytes: callers of ``send`` wait while more than this is queued.
    """

    owner: ConnectionOwner

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        description: str,
        send_queue_bytes: int,
    ) -> None:
        sock.setblocking(False)
        self.description = description
        self._loop = loop
        self._socket = sock
        self._descriptor = sock.fileno()
        self._decoder = Decoder(_HANDSHAKE_FRAME_BYTES)
        self._scratch = syscalls.ReceiveBuffer(self._decoder.scratch) if syscalls.AVAILABLE else None
        self._send_lock = threading.Lock()
        self._queue: deque[Any] = deque()
        self._count_lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._queued_bytes = 0
        self._queue_limit = send_queue_bytes
        self._room = threading.Condition(self._count_lock)
        self._waiting_for_room = 0
        self._stalled = False
        self._in_doubt = False
        self._writes = 0
        self._open = True
        self._write_error: OSError | None = None
        self._closing: str | None = None
        self.received_anything = False

    def start(self, owner: ConnectionOwner) -> None:
        """Begin to receive, and send the preamble."""
        self.owner = owner
        self._loop.add_reader(self._descriptor, self._readable)
        self.send([PREAMBLE], len(PREAMBLE), wait=False)

    def set_frame_limit(self, max_frame_bytes: int) -> None:
        self._decoder.max_frame_bytes = max_frame_bytes

    # ---- sending: any thread

    def send(self, buffers: Sequence[Any], size: int, *, aliased: bool = False, wait: bool = True) -> None:
        if size <= _SMALL_BYTES:
            self.send_small(b"".join(buffers), wait)
            return
        if not self._ready(wait):
            return
        pieces = [piece if type(piece) is bytes else memoryview(piece).cast("B") for piece in buffers]
        try:
            if not self._send_large(pieces, aliased):
                self._enqueue(_captured(pieces) if aliased else pieces, size)
            if self._queue:
                self._drain()
        except BaseException:
            self._interrupted()
            raise

    def send_small(self, frame: bytes, wait: bool) -> None:
        if not self._ready(wait):
            return
        try:
            if not self._send_now(frame):
                self._enqueue([frame], len(frame))
            if self._queue:
                self._drain()
        except BaseException:
            self._interrupted()
            raise

    def _ready(self, wait: bool) -> bool:
        """Whether there is any point in sending; waits for room in the queue if asked to."""
        if wait and self._queued_bytes > self._queue_limit:
            self._wait_for_room()
        if not self._open:
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        # After a write error it is about to be closed: what was received before is still being read.
        return self._write_error is None

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
                self._put_back([frame[count:]], len(frame) - count)
            self._in_doubt = False
            return count >= 0
        finally:
            self._send_lock.release()

    def _send_large(self, buffers: Sequence[Any], aliased: bool) -> bool:
        """As ``_send_now`` for a frame of any size."""
        if self._queue or not self._send_lock.acquire(False):
            return False
        try:
            if self._queue or not self._open or self._in_doubt:
                return False
            self._in_doubt = True
            left = deque(buffers)
            count = 1
            while left and count > 0:
                count = self._write([left[index] for index in range(min(len(left), _PIECES_PER_WRITE))])
                _discard(left, max(0, count))
            if left and not count:
                self._put_back(_captured(left) if aliased else list(left), sum(map(len, left)))
            self._in_doubt = False
            return True
        finally:
            self._send_lock.release()

    def _put_back(self, rest: list[Any], size: int) -> None:
        """With the send lock: queue the rest of a frame before what others have queued meanwhile."""
        with self._count_lock:
            self._queued_bytes += size
            self._queue.extendleft(reversed(rest))

    def _enqueue(self, pieces: list[Any], size: int) -> None:
        with self._count_lock:
            self._queued_bytes += size
            self._queue.extend(pieces)

    def _drain(self) -> None:
        while self._queue and not self._stalled and self._open:
            if not self._send_lock.acquire(False):
                return
            try:
                self._write_queue()
            finally:
                self._send_lock.release()

    def _write_queue(self) -> None:
        """With the send lock: write until the queue is empty or the kernel takes no more."""
        queue = self._queue
        if self._in_doubt:
            self._fail(OSError(errno.EINTR, "a thread was interrupted while it was writing"))
        elif self._write_error is not None:
            self._forget_queue()
        while queue and self._open and self._write_error is None:
            batch = [queue[index] for index in range(min(len(queue), _PIECES_PER_WRITE))]
            size = sum(map(len, batch))
            self._in_doubt = True
            count = self._write(batch)
            if count > 0 or count == size:
                _discard(queue, count)
                with self._count_lock:
                    self._queued_bytes -= count
                    if self._waiting_for_room and self._queued_bytes <= self._queue_limit:
                        self._room.notify_all()
            self._in_doubt = False
            if size and not count:
                if not self._stalled:
                    self._stalled = True
                    self._tell_loop(self._watch_writable)
                return

    def _write(self, batch: list[Any]) -> int:
        """With the send lock: one system call; 0 when the kernel takes nothing now, -1 when it failed."""
        self._writes += 1
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
                self._write_queue()
        else:
            self._drain()

    def _tell_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(callback)

    def _forget_queue(self) -> None:
        with self._count_lock:
            self._queue.clear()
            self._queued_bytes = 0
            self._room.notify_all()

    def _wait_for_room(self) -> None:
        with self._count_lock:
            self._waiting_for_room += 1
            try:
                while self._open and self._queued_bytes > self._queue_limit:
                    self._room.wait()
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
            self._write_queue()
            if not self._queue:
                self._stalled = False
                self._loop.remove_writer(self._descriptor)
        finally:
            self._send_lock.release()
        if self._queue:
            self._drain()
        elif self._closing is not None:
            self.close(self._closing)

    def _readable(self) -> bool:
        """Receive what there is; returns whether there may be more, which is left for the next time."""
        for _ in range(_READS_PER_WAKE_UP):
            if not self._open:
                return False
            decoder = self._decoder
            offset = decoder.scratch_offset
            if offset >= 0 and self._scratch is not None:
                capacity = len(decoder.scratch) - offset
                count = self._scratch.receive(self._descriptor, offset)
                if count <= 0:
                    count = self._receive(decoder.buffer())
            else:
                buffer = decoder.buffer()
                capacity = len(buffer)
                count = self._receive(buffer)
            if count <= 0:
                return False
            self.received_anything = True
            if not self._decode(count) or count < capacity:
                return False
        return self._open

    def _decode(self, count: int) -> bool:
        """Take in what was received; returns whether it makes sense."""
        while True:
            try:
                frames = self._decoder.received(count)
            except ProtocolError as error:
                self.close(str(error))
                return False
            if frames:
                self.owner.frames_received(self, frames)
            if not self._decoder.postponed or not self._open:
                return True
            count = 0

    def _receive(self, buffer: memoryview) -> int:
        """Receive through the socket; at the end of the stream closes and returns 0."""
        try:
            count = self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as error:
            self.close(f"the connection broke: {error.strerror or error}")
            return 0
        if not count:
            self.close(CLOSED_BY_PEER)
        return count

    def _write_failed(self) -> None:
        if self._readable() and not self._in_doubt:
            self._loop.call_soon(self._write_failed)  # once what came meanwhile is dealt with
        elif self._open:
            error = self._write_error
            self.close(f"the connection broke: {error.strerror if error else 'unknown'}")

    def close(self, reason: str, *, flush: bool = False) -> None:
        if not self._open:
            return
        if flush and self._queue and self._write_error is None:
            self._closing = reason
            # Whoever empties the queue, the loop looks again when the socket is writable.
            self._loop.add_writer(self._descriptor, self._writable)
            return
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        with self._send_lock:
            self._open = False
            self._socket.close()
        self._forget_queue()
        self.owner.connection_lost(self, reason)

    def abandon(self) -> None:
        self._open = False
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)


def _captured(pieces: Iterable[Any]) -> list[Any]:
    """The same bytes in memory that nobody else changes."""
    return [piece if type(piece) is bytes else bytes(piece) for piece in pieces]


def _discard(pieces: deque[Any], count: int) -> None:
    """Remove the first ``count`` bytes, and all empty pieces before what is left."""
    while pieces:
        length = len(pieces[0])
        if length > count:
            if count:
                pieces[0] = memoryview(pieces[0])[count:]
            return
        count -= length
        pieces.popleft()
