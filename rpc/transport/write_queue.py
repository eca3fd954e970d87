"""The sending half of a stream connection: what must be written, in order, and which thread writes it.

A thread that has a frame tries the send lock. If it gets the lock, it writes, starting with frames that other
threads have queued. After releasing the lock it checks the queue and the large messages again, since other
threads may have left something there meanwhile. If it does not get the lock, it only queues: no thread waits
for the lock. What the kernel does not accept stays queued, and the loop continues when the stream is
writable; until then the connection is *stalled*, and only the loop writes.

A thread that sends a large message writes only the beginning of it and leaves the rest to the loop. The
message is sent in chunks (see ``rpc.wire.chunking``), of which the queue has at most one; when that is
written, the next is queued behind what other threads have queued meanwhile. If there are bulk streams, the
largest messages go there instead (see ``rpc.bulk.streams``).

An acknowledgement is queued behind what is begun, and before all whole frames: however much is queued, and
however slow the stream is, the other side learns in time that its messages arrive.

If many calls are in flight, their frames are *coalesced*: they are only queued, until there are some tens of
them, or a thread waits for an answer, or the loop writes them. Each wake-up of the other side, and each
system call, then serves many frames.

The buffers of a message are released when the send lock is free: that may run code of the user's, which may
send, and wait for the answer.

The queue, the large messages, and the unacknowledged messages (see ``rpc.transport.session``) each have a
limit in bytes. Beyond it, callers that send more of the same kind wait for room; the loop never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final, Protocol

from rpc.runtime import waits
from rpc.runtime.blocking import Condition, wait_while
from rpc.runtime.interrupts import protected
from rpc.transport.base import INFINITE, SMALL_BYTES, ConnectionClosed, QueueFull
from rpc.transport.byte_stream import ByteStream
from rpc.transport.session import FEW, SHORT_BYTES, Session
from rpc.wire.chunking import WHOLE_BYTES, ChunkedMessage, Outgoing
from rpc.wire.frames import chunk_prefix, chunked

__all__ = ["CAPTURE_ALL", "STREAMED_BYTES", "Streams", "WriteQueue"]

CAPTURE_ALL: Final = sys.maxsize
"""Value of ``captured_bytes`` with which memory of any length is copied."""

_CALLER_BYTES: Final = 1 << 20
"""Number of bytes of large messages that a caller's thread writes before it leaves the rest to the loop."""
_LOOP_BYTES: Final = 128 << 10
"""Number of bytes that the loop writes before it looks at what it has received."""
_COALESCED_FRAMES: Final = 32
"""Number of coalesced frames that are sent without waiting for more."""
_PIECES_PER_WRITE: Final = 64
STREAMED_BYTES: Final = 640 << 10
"""Number of bytes from which on a message goes over bulk streams, if there are any."""
_CHUNK_END: Final = memoryview(b"")
"""Marker in the queue for the end of a chunk."""


class Streams(Protocol):
    """Takes messages of ``STREAMED_BYTES`` and more: ``rpc.bulk.stream_ends.BulkQueue``. From any thread."""

    def add(self, message: ChunkedMessage) -> bool:
        """Send a message; false if nothing is sent over streams any more."""

    def is_full(self) -> bool: ...

    def wait_for_room(self, deadline: float) -> bool: ...


class WriteQueue:
    """The data that a connected stream has not accepted yet. From any thread, except where noted.

    Args:
        loop: the running loop.
        stream: connected stream; its owner closes it while it holds ``lock``.
        description: text for errors that names the other end.
        queue_limit: number of queued bytes above which callers wait.
        captured_bytes: maximum size in bytes of memory of the caller's that may change as soon as it is
            queued.
        before_waiting: called before a thread waits for room.
        failed: called on the loop's thread when nothing can be written any more.
        emptied: called on the loop's thread when everything is written that was queued when ``finish`` was
            called.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: ByteStream,
        description: str,
        queue_limit: int,
        captured_bytes: int,
        *,
        before_waiting: Callable[[], object],
        failed: Callable[[], object],
        emptied: Callable[[], object],
    ) -> None:
        self.lock = threading.Lock()
        """The send lock."""
        self.description = description
        self.error: OSError | None = None
        """Reason why nothing can be written any more, or None."""
        self.outgoing = Outgoing(chunk_prefix, sys.maxsize, queue_limit)
        """The large messages."""
        self.streams: Streams | None = None
        """The bulk streams to the same peer, or None."""
        self._session: Session | None = None
        self._kept = deque[bytes](maxlen=0)  # which keeps nothing
        self._note_short: Callable[[bytes], object] = self._kept.append
        self._note: Callable[[bytes], object] = self._kept.append
        self._loop = loop
        self._stream = stream
        self._queue_limit = queue_limit
        self._captured_bytes = captured_bytes
        self._before_waiting, self._failed, self._emptied = before_waiting, failed, emptied
        self._queue: deque[Any] = deque()
        self._chunk_queued = False
        self._last: bytes | None = None
        self._count_lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._room = Condition(self._count_lock)
        self._queued_bytes = 0
        self._message_numbers = itertools.count()
        self._stalled = False
        self._flushing = False
        self._finishing = False
        self._open = True
        self._released: list[Any] = []
        """Buffers that are written or dropped, to be released without the send lock."""
        self._acknowledgement = deque[memoryview](maxlen=1)
        """The acknowledgement that is written next; a later one replaces it."""

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that are queued. From any thread."""
        return self._queued_bytes

    def __bool__(self) -> bool:
        """Whether anything must be written now."""
        if self._queue or self._acknowledgement or self.outgoing:
            return True
        return self._last is not None

    @protected
    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        """Send one frame; see ``Connection.send``."""
        if size <= SMALL_BYTES and not last:
            self.send_small(b"".join(buffers), wait)
            return
        in_chunks = size > WHOLE_BYTES and len(buffers) > 1
        streams = self.streams if in_chunks and size >= STREAMED_BYTES else None
        self._make_ready(wait, in_chunks, streams)
        pieces = [piece if type(piece) is bytes else memoryview(piece).cast("B") for piece in buffers]
        if last:
            self._last = b"".join(pieces)  # not into the queue, where it would overtake what is being sent
        elif in_chunks:
            self._send_chunked(pieces, size, aliased, streams)
        else:
            frame = b"".join(pieces)  # kept until it has arrived
            if not self._write_now(frame, size):
                self._enqueue(frame, size)
        if self:
            self.drain()

    @protected
    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False, patient: bool = False) -> None:
        """Send a frame in one piece; see ``Connection.send_small``."""
        if self._queued_bytes > self._queue_limit or len(self._kept) > FEW or not self._open:
            self._make_ready(wait, False)
        if coalesce:
            self._enqueue(frame, len(frame))
            if len(self._queue) >= _COALESCED_FRAMES:
                self.drain()
            elif not self._flushing:
                self._flushing = True
                self.tell_loop(self._flush)
            return
        if not self._write_now(frame, len(frame)):
            self._enqueue(frame, len(frame), patient=patient)
        if self._queue or self.outgoing.unsent or self._acknowledgement:
            self.drain()

    @protected
    def send_unnumbered(self, frame: bytes, *, newest: bool = False) -> None:
        """Send a frame that is not recorded in the session; see ``Connection.send_unnumbered``."""
        sign = memoryview(bytearray(frame))  # data of type ``bytes`` has a number
        if self._open and self.error is None and not self._write_now(sign, len(sign)):
            if newest:
                self._acknowledgement.append(sign)
            else:
                with contextlib.suppress(ConnectionClosed):
                    self._enqueue(sign, len(sign))
        if self:  # also what another thread has left meanwhile, and large messages
            self.drain()

    def carry(self, session: Session) -> None:
        """Record in ``session`` what is sent from now on. On the loop's thread, before other threads send."""
        session.got_room = self._go_on
        self._session, self._kept = session, session.sent
        self._note_short, self._note = session.sent.append, session.note

    def remains(self) -> list[bytes]:
        """Return the frames that were not begun to be written, once it is closed. On the loop's thread."""
        left: list[bytes] = []
        with contextlib.suppress(IndexError):
            while True:
                piece = self._queue.popleft()
                if type(piece) is bytes:
                    left.append(piece)
        return left

    @protected
    def drain(self) -> None:
        """Write what is queued, unless another thread is doing so, or the stream accepts nothing."""
        while self and not self._stalled and self._open and self.error is None:
            if not self.lock.acquire(False):
                return
            try:
                self._write(_CALLER_BYTES)
            finally:
                self._unlock()

    def finish(self) -> bool:
        """Call ``emptied`` when everything is written and flushed; false if it is, or never will be. On the
        loop's thread.
        """
        if self.error is not None or (not self and self._stream.is_flushed):
            return False
        self._finishing = True
        self._stream.on_writable(self._writable)
        return True

    def close(self) -> list[Any]:
        """Send nothing more. On the loop's thread, with ``lock``. The caller closes the stream, and releases
        what is returned without the lock.
        """
        self._open = False
        self._stream.on_writable(None)
        return self._forget()

    def abandon(self) -> None:
        """Send nothing more, in a forked child."""
        self._open = False

    def _make_ready(self, wait: float, in_chunks: bool, streams: Streams | None = None) -> None:
        """Wait for room if asked to. Raises ``ConnectionClosed`` if nothing can be sent."""
        large = streams or self.outgoing
        if wait and (large.is_full() if in_chunks else self._is_full()):
            self._before_waiting()
            deadline = monotonic() + wait
            with waits.waiting("a full send queue", to=self.description):
                wait_for_room = large.wait_for_room if in_chunks else self._wait_for_room
                has_room = wait_for_room(deadline)
            if not has_room:
                session = self._session
                what = "take what is queued for it"
                if session is not None and session.is_full():
                    what = f"acknowledge what it got: {len(session.sent)} messages, {session.kept} bytes"
                raise QueueFull(f"{self.description} does not {what}")
        if not self._open:
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        # After a write error it is about to be closed: what was received before is still being read. What is
        # queued until then is sent over the next connection, if there is one.

    def _is_full(self) -> bool:
        if not self._open or self.error is not None:
            return False
        session = self._session
        return self._queued_bytes > self._queue_limit or (session is not None and session.is_full())

    def _go_on(self) -> None:
        """Continue to write what is queued. From any thread."""
        with self._count_lock:
            self._room.notify_all()

    def _wait_for_room(self, deadline: float) -> bool:
        with self._count_lock:
            return wait_while(self._is_full, self._room, deadline)

    def _enqueue(self, frame: Any, size: int, *, patient: bool = False) -> None:
        with self._count_lock:
            self._queued_bytes += size
            self._queue.append(frame)
        if not self._open:
            try:
                self._queue.remove(frame)
            except ValueError:
                return  # ``remains`` has it
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        if self.outgoing.unsent and not patient:
            self.outgoing.shorten()

    def _capture(self, piece: Any) -> Any:
        """Return the same bytes in memory that nothing else changes, unless they are too many."""
        return piece if type(piece) is bytes or len(piece) > self._captured_bytes else bytes(piece)

    def _flush(self) -> None:
        """Write what was coalesced. On the loop's thread."""
        self._flushing = False
        self.drain()

    def _write_now(self, frame: Any, size: int) -> bool:
        """Write a frame, or queue the rest of it at the front; returns whether the caller is done with it."""
        if self._queue or not self.lock.acquire(False):
            return False
        try:
            if self._queue or not self._open or self.error is not None:
                return False
            count = self._stream.write((frame,))
            if count == size and type(frame) is bytes:
                if size <= SHORT_BYTES:
                    self._note_short(frame)
                else:
                    self._note(frame)
            elif count < size:
                left = deque((frame,))
                self._discard(left, count)
                self._write_all(left)
                self._put_back(left)
        except OSError as error:
            self._fail(error)
            return False
        finally:
            self.lock.release()
            if self._released:  # as ``_unlock``, for each call
                self._released.clear()
        return True

    def _send_chunked(self, pieces: Sequence[Any], size: int, aliased: bool, streams: Streams | None) -> None:
        outgoing = self.outgoing
        session = self._session
        number = next(self._message_numbers) if session is None else session.begin_large(bytes(pieces[0]))
        message = chunked(pieces, size, number)
        if streams is not None:
            if aliased:
                message.replace(self._capture)
                aliased = False
            if streams.add(message):
                return
        if not self._write_beginning(message, aliased):
            if aliased:
                message.replace(self._capture)
            if outgoing.add(message) or session is None:
                return
            # The connection that replaces this one may have been resumed, and would report no loss any more.
            if session.large.pop(number, None) is not None:
                raise ConnectionClosed(f"the connection to {self.description} is broken")

    def _write_beginning(self, message: ChunkedMessage, aliased: bool) -> bool:
        """Write the beginning of a message in chunks, of which the rest is left to the loop; returns like
        ``_write_now``.
        """
        if self._queue or self.outgoing or not self.lock.acquire(False):
            return False
        try:
            if self._queue or self.outgoing or not self._open or self.error is not None:
                return False
            # This thread writes what would otherwise have to be copied, as long as the kernel accepts it.
            end = (
                0 if aliased and self._captured_bytes == CAPTURE_ALL else max(0, message.size - _CALLER_BYTES)
            )
            left: deque[Any] = deque()
            while message.unsent > end and not left and self.error is None:
                if self._queue:  # to its end: the rest of it may begin in the middle of a frame
                    if not self._write_batch():
                        break
                    continue
                left.extend(self.outgoing.chunk(message))
                self._write_all(left)
            if aliased:
                left = deque(memoryview(self._capture(piece)) for piece in left)
                message.replace(self._capture)
            if self.error is None:
                if left:
                    self._put_back([*left, _CHUNK_END])
                    self._chunk_queued = True
                if message.unsent:
                    self.outgoing.add(message)
            return True
        finally:
            self._unlock()

    def _unlock(self) -> None:
        """Release the send lock, and then what was written."""
        self.lock.release()
        if self._released:
            self._released.clear()

    # ---- with the send lock

    def _write(self, budget: int) -> None:
        """Write until nothing is left, the stream accepts no more, or enough is written."""
        queue = self._queue
        while self._open and self.error is None:
            if self._acknowledgement:
                self._queue_acknowledgement(self._acknowledgement.popleft())
            if not self._chunk_queued and self.outgoing:
                self._queue_chunk()
            if not queue and not self.outgoing and self._last is not None:
                self._put_back([memoryview(self._last)])
                self._last = None
            if not queue:
                return
            taken = self._write_batch()
            budget -= taken
            if not taken or (budget <= 0 and (self.outgoing or self._stalled)):
                self._stall()
                return

    def _stall(self) -> None:
        if self.error is None and not self._stalled:
            self._stalled = True
            self.tell_loop(self._watch)

    def _write_batch(self) -> int:
        """Write a part of the queue in one system call; returns the number of bytes, 0 if the stream accepts
        none.
        """
        queue = self._queue
        batch = [queue[index] for index in range(min(len(queue), _PIECES_PER_WRITE))]
        try:
            count = self._stream.write(batch)
        except OSError as error:
            self._fail(error)
            return 0
        if self._discard(queue, count):
            self._chunk_queued = False
        with self._count_lock:
            self._queued_bytes -= count
            self._room.notify_all()
        return count

    def _write_all(self, pieces: deque[Any]) -> None:
        """Write what the stream accepts of ``pieces``, and remove it."""
        while pieces:
            try:
                count = self._stream.write(
                    [pieces[index] for index in range(min(len(pieces), _PIECES_PER_WRITE))]
                )
            except OSError as error:
                self._fail(error)
                return
            if not count:
                return
            self._discard(pieces, count)

    def _queue_acknowledgement(self, sign: memoryview) -> None:
        """Queue the acknowledgement before the first frame that is surely whole: parts of frames, and chunks,
        are views.
        """
        queue, place = self._queue, 0
        while place < len(queue) and type(queue[place]) is not bytes:
            place += 1
        with self._count_lock:
            self._queued_bytes += len(sign)
            queue.insert(place, sign)

    def _queue_chunk(self) -> None:
        """Queue the next chunk of a large message."""
        pieces = self.outgoing.next()
        if pieces:
            self._chunk_queued = True
            with self._count_lock:
                self._queued_bytes += sum(map(len, pieces))
                self._queue.extend([*pieces, _CHUNK_END])

    def _put_back(self, rest: Iterable[Any]) -> None:
        """Queue the rest of a frame before what other threads have queued meanwhile."""
        pieces = list(rest)
        with self._count_lock:
            self._queued_bytes += sum(map(len, pieces))
            self._queue.extendleft(reversed(pieces))

    def _fail(self, error: OSError) -> None:
        """Send nothing more. What the peer sent before the connection broke is still read, so the loop closes
        it.
        """
        self.error = error.with_traceback(None)  # which would keep what all callers hold
        with self._count_lock:
            self._room.notify_all()
        self._released += self.outgoing.close()
        self.tell_loop(self._failed)

    def _forget(self) -> list[Any]:
        dropped: list[Any] = []
        with self._count_lock:
            if self._session is None:
                dropped += self._queue
                self._queue.clear()
            self._last = None
            self._queued_bytes = 0
            self._room.notify_all()
        return [*dropped, *self.outgoing.close()]

    def tell_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        """Make the loop call a function soon."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _discard(self, pieces: deque[Any], count: int) -> bool:
        """Remove the first ``count`` bytes, which are written, and all empty pieces that follow; returns
        whether a chunk ended there.
        """
        chunk_ended = False
        while pieces:
            length = len(pieces[0])
            if length > count:
                if count:
                    if type(pieces[0]) is bytes:
                        self._note(pieces[0])
                    pieces[0] = memoryview(pieces[0])[count:]
                break
            count -= length
            piece = pieces.popleft()
            if type(piece) is bytes:
                if length <= SHORT_BYTES:
                    self._note_short(piece)
                else:
                    self._note(piece)
            elif piece is _CHUNK_END:
                chunk_ended = True
            else:
                self._released.append(piece)
        return chunk_ended

    # ---- the loop's thread

    def _watch(self) -> None:
        if self._open:
            self._stream.on_writable(self._writable)

    def _writable(self) -> None:
        if not self.lock.acquire(False):
            if not self._finishing:
                # Leave it to the thread that has the lock, since the event would be raised again and again
                # meanwhile.
                self._stream.on_writable(None)
                self._stalled = False
                self.drain()
            return
        try:
            self._write(_LOOP_BYTES)
            if not self or self.error is not None:
                self._stalled = False
                if not self._finishing:  # otherwise it comes here again until it is closed
                    self._stream.on_writable(None)
        finally:
            self._unlock()
        if self and self.error is None:
            self.drain()
        elif self._finishing and (self._stream.is_flushed or self.error is not None):
            self._emptied()
