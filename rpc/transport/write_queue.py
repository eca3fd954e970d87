"""What is to be written to a socket, in order, and the writing of it.

Everything that writes holds the *send lock*; ``sending.py`` says who takes it, and when. What the kernel does
not take stays queued, and the loop goes on with it when the socket is writable; until then the connection is
*stalled*, and only the loop writes.

Large messages go out in chunks (see ``rpc.wire.chunking``). The queue never has more than one chunk; when
that is written, the next is put behind what others have queued meanwhile.

The queue has a limit in bytes, and so have the large messages beside it: beyond it, callers with more of the
same kind wait for room; the loop never does.

An exception may hit a thread between a write and the account of it: Ctrl-C can come after any call. While
that may be, the stream is *in doubt*. Small writes note within C code how much the kernel has taken, and who
finds the stream in doubt when the lock is free goes by that. Of other writes nobody knows how much is out,
and no more is written: the connection breaks, and no other frame lands inside a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Final

from rpc.transport import syscalls
from rpc.transport.base import QueueFull
from rpc.wire.chunking import ChunkedMessage, Outgoing
from rpc.wire.frames import chunk_prefix

__all__ = ["CALLER_BYTES", "CAPTURE_ALL", "CHUNK_END", "WriteQueue"]

CAPTURE_ALL: Final = sys.maxsize
"""As ``captured_bytes``: however long it is."""

CALLER_BYTES: Final = 1 << 20
"""How much of large messages a caller's thread writes before it leaves the rest to the loop."""

CHUNK_END: Final = memoryview(b"")
"""Marks in the queue where a chunk ends."""

_PIECES_PER_WRITE: Final = 64
_JOINED_BYTES: Final = 16 << 10
"""So little is quicker copied into one piece than written by a call that lets go of the GIL."""
_SLICE_SECONDS: Final = 0.5
"""A signal right before a wait does not end it: no wait is longer than this."""


class _FromQueue(list[int]):
    """How much of the queue is being written, and how much of that the kernel has taken, once it has."""


class WriteQueue(ABC):
    """The frames that a connected, non-blocking stream socket has still to take.

    What adds to the queue or waits for room may be called from any thread; what writes, with the send lock
    only.

    Args:
        loop: the running loop.
        sock: connected.
        description: names the other end in logs.
        send_queue_bytes: callers wait while more than this is queued.
        captured_bytes: memory of the caller's, where it is no longer than this, may change as soon as it is
            queued.
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
        self._captured_bytes = captured_bytes
        self._count_lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._queued_bytes = 0
        self._outgoing_bytes = 0
        self._queue_limit = send_queue_bytes
        self._room = threading.Condition(self._count_lock)
        self._waiting_for_room = 0
        self._stalled = False
        self._in_doubt: bool | list[Any] = False
        self._writes = 0
        self._open = True
        self._write_error: OSError | None = None

    # ---- any thread

    def _enqueue(self, pieces: Iterable[Any], size: int) -> None:
        with self._count_lock:
            self._queued_bytes += size
            self._queue.extend(pieces)
        if self._outgoing:
            self._outgoing.shorten()

    def _add(self, message: ChunkedMessage, aliased: bool) -> None:
        if aliased:
            message.replace(self._capture)
        with self._count_lock:
            self._outgoing_bytes += message.size
            self._outgoing.add(message)

    def _capture(self, piece: Any) -> Any:
        """The same bytes in memory that nobody else changes, unless it is too long for that."""
        return piece if type(piece) is bytes or len(piece) > self._captured_bytes else bytes(piece)

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

    def _tell_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(callback, *arguments)

    # ---- with the send lock

    def _settles_doubt(self) -> bool:
        """Whether the interrupted thread had noted how much the kernel took, so that all can be put in order.

        So it is where frames of the queue were written, and where a frame in one piece is out, or none of it.
        """
        noted = self._in_doubt
        if not isinstance(noted, list):
            return not noted
        taken = max(0, noted[1]) if len(noted) == 2 else 0
        self._in_doubt = True
        if isinstance(noted, _FromQueue):
            if taken:
                self._written(taken)
        elif not taken:
            self._put_back(noted[:1])
        elif taken < len(noted[0]):
            return False  # its rest may be queued or not
        self._in_doubt = False
        return True

    def _write_queue(self, budget: int) -> None:
        """Write until nothing is left, the kernel takes no more, or it is enough."""
        queue = self._queue
        if self._in_doubt and not self._settles_doubt():
            self._fail(OSError(errno.EINTR, "a thread was interrupted while it was writing"))
        elif self._write_error is not None:
            self._forget_queue()
        while self._open and self._write_error is None:
            if self._outgoing and not self._chunk_queued:
                self._queue_chunk()
            if not queue:
                return
            self._in_doubt = True
            taken = self._write_batch(noting=True)
            self._in_doubt = False
            budget -= taken
            if taken < 0 or (budget <= 0 and (self._outgoing or self._stalled)):
                if not self._stalled:
                    self._stalled = True
                    self._tell_loop(self._watch_writable)
                return

    def _write_batch(self, *, noting: bool = False) -> int:
        """While in doubt, write some of the queue, in one system call.

        Args:
            noting: nothing else is under way, so that an interruption does no harm once it is written.

        Returns:
            How many bytes were written, or -1 if the kernel takes nothing now.
        """
        queue = self._queue
        batch = [queue[index] for index in range(min(len(queue), _PIECES_PER_WRITE))]
        size = sum(map(len, batch))
        small = syscalls.AVAILABLE and 0 < size <= _JOINED_BYTES
        count = self._write_noting(b"".join(batch)) if noting and small else 0
        if count <= 0:
            count = self._write(batch)
        if count < 0:
            return 0
        if size and not count:
            return -1
        self._written(count)
        return count

    def _write_noting(self, data: bytes) -> int:
        """One system call; 0 or -1 when the kernel takes nothing, for whatever reason."""
        self._writes += 1
        self._in_doubt = noted = _FromQueue((len(data),))
        syscalls.send_noting(self._descriptor, data, noted)
        self._in_doubt = True
        return noted[1]

    def _written(self, count: int) -> None:
        """The kernel has taken so much of the queue."""
        if _discard(self._queue, count):
            self._chunk_queued = False
        with self._count_lock:
            self._queued_bytes -= count
            if self._waiting_for_room:
                self._room.notify_all()

    def _queue_chunk(self) -> None:
        """The next chunk of a large message is to be written."""
        self._in_doubt = True
        pieces = self._outgoing.next()
        self._chunk_queued = True
        with self._count_lock:
            self._queued_bytes += sum(map(len, pieces))
            self._outgoing_bytes -= sum(map(len, pieces[1:]))  # the first is none of a message
            self._queue.extend([*pieces, CHUNK_END])
        self._in_doubt = False

    def _write_all(self, pieces: deque[Any]) -> None:
        """Write what the kernel takes of ``pieces``, and remove it.

        After a write error there is nothing left.
        """
        while pieces:
            count = self._write([pieces[index] for index in range(min(len(pieces), _PIECES_PER_WRITE))])
            if count < 0:
                pieces.clear()
            elif not count:
                return
            _discard(pieces, count)

    def _put_back(self, rest: Iterable[Any]) -> None:
        """Queue the rest of a frame before what others have queued meanwhile."""
        pieces = list(rest)
        with self._count_lock:
            self._queued_bytes += sum(map(len, pieces))
            self._queue.extendleft(reversed(pieces))

    def _write(self, batch: list[Any]) -> int:
        """One system call; 0 when the kernel takes nothing now, -1 when it failed."""
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
        self._write_error = error.with_traceback(None)  # which would keep what all callers have in hand
        self._forget_queue()
        self._tell_loop(self._write_failed)

    # ---- the loop's thread

    @abstractmethod
    def _watch_writable(self) -> None:
        """What is queued goes on when the socket is writable."""

    @abstractmethod
    def _write_failed(self) -> None:
        """Nothing can be written any more."""


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
        if pieces.popleft() is CHUNK_END:
            chunk_ended = True
    return chunk_ended
