"""Large messages in chunks, so that small ones need not wait for them: without I/O.

A message of more than ``WHOLE_BYTES`` travels as a series of frames. The *opening* has its number, prefix,
table and header; *chunks* have the rest of the message, its buffers and the padding between them, each with
its offset in the message. The chunks of several messages may alternate, and any other frame may come between
them. If two workers have bulk streams (``rpc.bulk.streams``), the chunks of the largest messages travel there
instead, and the threads of the streams fill the same reassembly.

``Outgoing`` decides which chunk is next: each open message in turn. Chunks are long, which costs less, until
a small message has had to wait behind one; then they are short for a while. ``Reassembly`` decides where the
bytes of a chunk are received: directly into their final place. Each larger buffer gets memory of its own, so
that a tensor can use it without keeping the rest of the message alive; or the message goes to a ``Target``,
memory that is provided for it (``targets.py``).

If there is no memory for a message, its chunks are dropped as they arrive, and it is delivered as
``Incomplete``: with its header, and without its buffers. So only the call that needs them fails, and the
connection continues.

The promises of a peer are limited: ``MAX_OPEN`` messages at a time, whose missing bytes do not exceed the
size of the largest message that is accepted. Each bulk stream adds to both, since the streams are not ordered
with each other.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from rpc.errors import ProtocolError
from rpc.runtime.blocking import wait_while
from rpc.wire.targets import MergingTarget, Target

__all__ = [
    "CHUNK_BYTES",
    "MAX_BUFFERS",
    "MAX_OPEN",
    "SHORT_CHUNK_BYTES",
    "WHOLE_BYTES",
    "ArrivingMessage",
    "ChunkedMessage",
    "Incomplete",
    "NoMemory",
    "Outgoing",
    "Reassembly",
    "Room",
    "allocate",
]

WHOLE_BYTES: Final = 256 << 10
"""Maximum size in bytes of a message that is sent as one frame."""

CHUNK_BYTES: Final = 512 << 10
"""Size in bytes of a chunk, if no small message had to wait recently."""

SHORT_CHUNK_BYTES: Final = 128 << 10
"""Size in bytes of a chunk otherwise: the most that a series of small messages waits for. Chunks begin at
multiples of it.
"""

_SHORT_FOR_BYTES: Final = 64 << 20
"""Number of bytes sent in short chunks after a small message: at 10 Gbit/s, in about 50 ms."""

MAX_OPEN: Final = 64
"""Maximum number of messages that a peer has begun and not finished, for the connection and each stream."""

MAX_BUFFERS: Final = 1 << 20
"""Maximum number of buffers in all open messages together, and in any single message."""

_UNDER_WAY_BYTES: Final = 32 << 20
"""Number of bytes that kernels may buffer on one stream."""

_OPENING_SECONDS: Final = 60.0
"""Timeout in seconds for a message's opening to arrive on the connection when one of its chunks has
arrived.
"""

_KEPT_BYTES: Final = 4 << 10
"""Number of bytes kept of an incomplete message's first buffer, which begins with ids in some kinds."""

_SENT_AT_ONCE: Final = 8
_OWN_MEMORY_BYTES: Final = 128 << 10
_PAGE_BACKED_BYTES: Final = 4 << 20


class ChunkedMessage:
    """A large message to be sent: its opening frame, its number, and the buffers that follow in chunks,
    contiguous, referenced and not copied; ``size`` is the sum of their lengths in bytes, ``kind`` that of its
    frame.
    """

    def __init__(self, head: bytes, number: int, pieces: Sequence[Any], size: int, kind: int = 0) -> None:
        self.head = head
        self.number = number
        self.kind = kind
        self.size = size
        self.unsent = size
        self.is_open = False
        """Whether its opening is sent."""
        self._pieces = deque(pieces)

    def take(self, count: int) -> list[Any]:
        """Remove the next ``count`` bytes, at most as many as there are; returns them as buffers."""
        taken: list[Any] = []
        self.unsent -= count
        while count:
            piece = self._pieces.popleft()
            if len(piece) > count:
                view = memoryview(piece)
                piece = view[:count]
                self._pieces.appendleft(view[count:])
            taken.append(piece)
            count -= len(piece)
        return taken

    def replace(self, capture: Callable[[Any], Any]) -> None:
        """Replace every piece that is not sent yet by ``capture(piece)``."""
        self._pieces = deque(map(capture, self._pieces))


class Outgoing:
    """The large messages to one peer that are not sent yet. From any thread.

    Args:
        chunk_prefix: makes the prefix of a chunk from the message's number, the chunk's offset and length.
            queue_limit: callers wait while more bytes than this are unsent.

    Attributes:
            max_bytes: maximum number of bytes of open messages that the peer accepts; one message may always
            be open.
            unsent: number of bytes that are not yet in any chunk.
    """

    def __init__(
        self, chunk_prefix: Callable[[int, int, int], bytes], max_bytes: int, queue_limit: int
    ) -> None:
        self.max_bytes = max_bytes
        self.unsent = 0
        self._chunk_prefix = chunk_prefix
        self._queue_limit = queue_limit
        self._lock = threading.RLock()  # reentrant: a finalizer that runs while it is held may send
        self._room = threading.Condition(self._lock)
        self._waiting: deque[ChunkedMessage] = deque()
        self._open: deque[ChunkedMessage] = deque()
        self._sent = 0
        self._short_until = 0
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    def wait_for_room(self, deadline: float) -> bool:
        """Wait while the queue is full; false if it still is at ``deadline``."""
        with self._lock:
            return wait_while(self.is_full, self._room, deadline)

    def is_full(self) -> bool:
        """Whether the queue is full."""
        return self.unsent > self._queue_limit and not self._closed

    def add(self, message: ChunkedMessage) -> bool:
        """Queue a message, or the rest of one; it is opened when its turn comes. Returns false if nothing can
        be sent any more.
        """
        with self._lock:
            if self._closed:
                return False
            self.unsent += message.unsent
            if message.is_open:
                self._open.append(message)
            else:
                self._waiting.append(message)
        return True

    def shorten(self) -> None:
        """Make the next chunks short, for a while: a small message waits behind a chunk."""
        self._short_until = self._sent + _SHORT_FOR_BYTES

    def next(self) -> list[Any]:
        """Return what is sent next: a chunk with its prefix, after the opening if it is the first of its
        message; empty if there is nothing.
        """
        with self._lock:
            self._begin_next()
            if not self._open:
                return []
            message = self._open[0]  # not removed yet, as other threads check whether there is one
            before = message.unsent
            pieces = self.chunk(message)
            self.unsent -= before - message.unsent
            self._room.notify_all()
            if message.unsent:
                self._open.rotate(-1)
            else:
                self._open.popleft()
        return pieces

    def _begin_next(self) -> None:
        """Start the next waiting message, if it may be sent now."""
        if not self._waiting or len(self._open) >= _SENT_AT_ONCE:
            return
        open_bytes = sum(message.size for message in self._open)
        if not self._open or open_bytes + self._waiting[0].size <= self.max_bytes:
            self._open.appendleft(self._waiting[0])
            self._waiting.popleft()

    def chunk(self, message: ChunkedMessage) -> list[Any]:
        """Return the next chunk of a message, which need not have been added."""
        count = min(SHORT_CHUNK_BYTES if self._sent < self._short_until else CHUNK_BYTES, message.unsent)
        self._sent += count
        prefix = self._chunk_prefix(message.number, message.size - message.unsent, count)
        if not message.is_open:
            message.is_open = True
            prefix = message.head + prefix
        # Views: ``bytes`` in a queue are messages of their own.
        return [memoryview(prefix), *(memoryview(piece) for piece in message.take(count))]

    def close(self) -> None:
        """Drop everything: nothing more can be sent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._open.clear()
            self.unsent = 0
            self._room.notify_all()


@dataclass(frozen=True, slots=True)
class Room:
    """The size of a buffer in its message: its length, and that including its padding, in bytes."""

    length: int
    padded: int


_HUGE_PAGES: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
"""Advice for huge pages. Touching fresh memory takes longer than filling it; with huge pages a third of that
(measured).

Smaller blocks come from the allocator, which keeps freed memory (see ``process_tuning``), uncleared: 1 MB
then arrives in 0.9 ms, compared with 1.4 ms in fresh pages of the usual size (measured).
"""


def allocate(length: int) -> memoryview:
    """Return writable memory, which is not cleared; large blocks come as fresh pages.

    It is private to this process: in a forked child, tensors in it are the child's own.
    """
    try:
        if length < _PAGE_BACKED_BYTES:
            return np.empty(length, np.uint8).data
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _HUGE_PAGES is not None:
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(_HUGE_PAGES)
        return memoryview(pages)
    except (MemoryError, OSError, OverflowError) as error:
        raise NoMemory(f"there is no memory for a frame of {length} bytes ({error})") from error


class NoMemory(ProtocolError):
    """The receiver cannot allocate what a frame or a message needs."""


class Incomplete(list[Any]):
    """The buffers of a message for which there was no memory: the beginning of the first one, and nothing of
    the others.

    Attributes:
        size: size in bytes of all buffers.
        reason: why there was no memory.
    """

    def __init__(self, buffers: Sequence[memoryview], size: int, reason: str) -> None:
        super().__init__(buffers)
        self.size = size
        self.reason = reason


class ArrivingMessage:
    """An open message: its memory, and which cells of ``SHORT_CHUNK_BYTES`` have begun to arrive.

    Adjacent small buffers share a block of memory, every other buffer has its own.
    """

    def __init__(
        self,
        what: Any,
        rooms: Sequence[Room],
        lead: int,
        allocate: Callable[[int], memoryview],
        target: Target | None,
    ) -> None:
        self.what = what
        self.size = self.left = sum(room.padded for room in rooms)
        self.rooms = len(rooms)
        """Number of its buffers at the sender; those of a target may be divided differently."""
        self.is_dropped = False
        """Whether the rest of it will not arrive, and further chunks are discarded."""
        self.begun = bytearray(-(-self.size // SHORT_CHUNK_BYTES))
        self.buffers: list[memoryview] = []
        """The message's buffers; always the same list, even when they change."""
        self.target = target
        """Its target, unless that was taken back, or is ``merging``."""
        self.merging: MergingTarget | None = None
        """What its buffers are merged into, from ``merged_from`` on. They have no memory then."""
        self.merged_from = rooms[0].padded if rooms else 0
        """Offset of the second buffer."""
        self._rooms, self._lead, self._allocate = rooms, lead, allocate
        try:
            self._find_memory(target)
        except NoMemory as error:
            self._use_none(str(error))

    def _find_memory(self, target: Target | None) -> None:
        rooms = self._rooms
        if isinstance(target, MergingTarget):
            self.target = None
            if target.begin(self.buffers):
                buffers, memory = self._own_memory(rooms[:1])
                self._use([*buffers, *target.buffers], memory)
                self.merging = target
                return
        if self.target is None:
            self._use(*self._own_memory(rooms))
        else:
            buffers, memory = self._own_memory(rooms[:1])
            self._use([*buffers, *self.target.buffers], memory + self._memory_of(self.target))
            self.target.attach(self)

    def _use_none(self, reason: str) -> None:
        first, *others = self._rooms
        kept = memoryview(bytearray(min(first.length, _KEPT_BYTES)))
        sink = memoryview(bytearray(min(self.size, SHORT_CHUNK_BYTES)))
        times, rest = divmod(self.size - len(kept), len(sink))
        self.target = None
        self._use([], [part for part in (kept, *[sink] * times, sink[:rest]) if part])
        self.buffers = Incomplete([kept, *[kept[:0]] * len(others)], self.size, reason)

    def _use(self, buffers: list[memoryview], memory: list[memoryview]) -> None:
        self.buffers[:] = buffers
        self._memory = memory  # in order, with the padding between buffers
        self._ends = list(accumulate(map(len, memory)))

    def _own_memory(self, rooms: Sequence[Room]) -> tuple[list[memoryview], list[memoryview]]:
        buffers: list[memoryview] = []
        memory: list[memoryview] = []
        index = 0
        while index < len(rooms):
            first = index
            total = rooms[index].padded
            index += 1
            if total < _OWN_MEMORY_BYTES:
                while index < len(rooms) and rooms[index].padded < _OWN_MEMORY_BYTES:
                    total += rooms[index].padded
                    index += 1
            lead_here = 0 if first else self._lead
            block = self._allocate(lead_here + total)[lead_here:]
            if total:
                memory.append(block)
            start = 0
            for room in rooms[first:index]:
                buffers.append(block[start : start + room.length])
                start += room.padded
        return buffers, memory

    def _memory_of(self, target: Target) -> list[memoryview]:
        memory: list[memoryview] = []
        rest = deque(target.buffers)
        for room in self._rooms[1:]:
            left = room.length
            while left:
                buffer = rest.popleft()
                if len(buffer) > left:
                    rest.appendleft(buffer[left:])
                memory.append(buffer[:left])
                left -= len(memory[-1])
            if room.padded > room.length:
                memory.append(memoryview(bytearray(room.padded - room.length)))
        return memory

    def move(self) -> None:
        """Detach from the target, with the target's lock held."""
        if self.target is None or self.is_dropped:
            return
        before, own = self._memory, self._own_memory(self._rooms)
        self.target = None
        self._use(*own)
        offset = 0
        for part in before:
            self._write(offset, part)
            offset += len(part)

    def room(self, offset: int, length: int) -> memoryview:
        """Return the memory for bytes from ``offset`` on: for at least one, and at most ``length``
        of them.
        """
        index = bisect_right(self._ends, offset)
        memory = self._memory[index]
        start = offset - (self._ends[index] - len(memory))
        return memory[start : start + length]

    def fill(self, offset: int, data: memoryview) -> None:
        """Store bytes that have arrived."""
        with self.writing():
            self._write(offset, data)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the target from being taken back while the block writes to the memory from ``room``."""
        target = self.target
        if target is None:
            yield
            return
        target.enter()
        try:
            yield
        finally:
            target.leave()

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            room = self.room(offset, len(data))
            room[:] = data[: len(room)]
            offset += len(room)
            data = data[len(room) :]


class Reassembly:
    """Reassembles the chunks of one peer, from the connection and from bulk streams. From any thread.

    Args:
        allocate: returns writable memory.

    Attributes:
        find_target: returns the target of a message, given its kind, its call id and the sizes of its
        buffers.
        streams: number of bulk streams on which chunks may arrive.
        promised: number of bytes of open messages that have not arrived.
        open_messages: the open messages, by number.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self.find_target: Callable[[int, int, Sequence[int]], Target | None] = _no_target
        self.promised = 0
        self.streams = 0
        self.open_messages: dict[int, ArrivingMessage] = {}
        self._allocate = allocate
        self._buffers = 0
        self._is_cleared = False
        self._opened = threading.Condition()

    def __bool__(self) -> bool:
        return bool(self.open_messages)

    @property
    def leeway(self) -> int:
        """Number of bytes beyond its limit that a peer may promise."""
        return _UNDER_WAY_BYTES * self.streams

    def open(
        self,
        number: int,
        what: Any,
        rooms: Sequence[Room],
        lead: int = 0,
        target: Target | None = None,
    ) -> None:
        """Start a message, which has this number in its chunks.

        Args:
            what: returned with its buffers when it is complete.
            lead: distance in bytes of its first buffer from an alignment boundary.
            target: memory for its buffers from the second on, of the same total size.

        Raises:
            ProtocolError: it is open already, or too many messages are, or they have too many buffers, or it
                has no chunks.
        """
        if not any(room.padded for room in rooms):
            raise ProtocolError("a message in chunks has nothing in them")
        if number in self.open_messages:
            raise ProtocolError(f"message {number} was opened twice")
        if len(self.open_messages) >= MAX_OPEN * (1 + self.streams):
            raise ProtocolError(f"more than {MAX_OPEN} messages are open at a time")
        if self._buffers + len(rooms) > MAX_BUFFERS:
            raise ProtocolError(f"the open messages have more than {MAX_BUFFERS} buffers")
        message = ArrivingMessage(what, rooms, lead, self._allocate, target)
        with self._opened:
            if number in self.open_messages:  # opened in the meantime on another stream
                raise ProtocolError(f"message {number} was opened twice")
            message.is_dropped = self._is_cleared
            self.open_messages[number] = message
            self._buffers += len(rooms)
            self.promised += message.size
            self._opened.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until a message is open whose opening arrives on another connection than its first chunk.
        Raises ``ProtocolError`` if it does not arrive.
        """
        if number in self.open_messages:
            return
        with self._opened:
            there = self._opened.wait_for(
                lambda: self._is_cleared or number in self.open_messages, _OPENING_SECONDS
            )
        if not there or self._is_cleared:
            raise ProtocolError(f"a chunk belongs to message {number}, which is not open")

    def begin(self, number: int, offset: int, length: int, *, on_stream: bool = False) -> ArrivingMessage:
        """Start a chunk; returns its message. Raises ``ProtocolError`` if no such chunk is expected."""
        message = self.open_messages.get(number)
        if message is None:
            raise ProtocolError(f"a chunk belongs to message {number}, which is not open")
        if message.merging is not None and not on_stream:
            raise ProtocolError(f"a chunk of message {number} has come on the connection, others on streams")
        end = offset + length
        first, beside = divmod(offset, SHORT_CHUNK_BYTES)
        if beside or not length or end > message.size or (end % SHORT_CHUNK_BYTES and end != message.size):
            raise ProtocolError(f"no chunk of {length} bytes is at {offset} in a message of {message.size}")
        cells = slice(first, -(-end // SHORT_CHUNK_BYTES))
        with self._opened:
            if any(message.begun[cells]):
                raise ProtocolError(f"the chunk at {offset} of message {number} has come twice")
            message.begun[cells] = b"\1" * (cells.stop - cells.start)
        return message

    def filled(self, number: int, length: int) -> tuple[Any, list[memoryview]] | None:
        """Record that a chunk has arrived completely; returns ``what`` and the buffers of its message if that
        is complete now.
        """
        with self._opened:
            message = self.open_messages.get(number)
            if message is None:  # dropped in the middle of this chunk
                return None
            message.left -= length
            self.promised -= length
            if message.left:
                return None
            del self.open_messages[number]
            self._buffers -= message.rooms
        return message.what, message.buffers

    def clear(self) -> None:
        """Drop everything: nothing more will arrive, except the rest of a chunk on each stream."""
        with self._opened:
            self._is_cleared = True
            for message in self.open_messages.values():
                message.is_dropped = True
            self.open_messages.clear()
            self._buffers = self.promised = 0
            self._opened.notify_all()


def _no_target(kind: int, call_id: int, sizes: Sequence[int]) -> None:
    return None
