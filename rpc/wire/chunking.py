"""Large messages in chunks, so that small ones need not wait for them: without I/O.

A message of more than ``WHOLE_BYTES`` travels as a series of frames. *Opening* numbers it and brings its
prefix, table and header; *chunks* bring what follows these in the message, its buffers and the padding
between, each saying where in the message it belongs. The chunks of several messages may alternate, and any
other frame may come between them. Where two workers have several connections (*lanes*), each lane takes the
next chunk when it has room, and the first chunk of a message on a lane comes behind an opening of its own: so
no lane ever has to wait for another. The first chunk of all goes over the first lane, which small messages
take too: so no message arrives before what was sent before it.

``Outgoing`` says which chunk goes next: of each open message one in turn. Chunks are long, which costs less,
until something small has had to wait behind one; then they are short for a while. ``Reassembly`` says where
the bytes of a chunk go: straight to where they stay. Each larger buffer gets memory of its own, so that a
tensor can be made over it without keeping the rest of the message alive; or the message goes to a ``Target``,
memory that somebody has ready for it.

If there is no memory for a message, its chunks are dropped as they come, and it arrives ``Incomplete``: with
its header, and without its buffers. So only what needs them fails, and the connection goes on.

What a peer may promise is limited: ``MAX_OPEN`` messages at a time on each lane, of which no more is still to
come than the largest message that is accepted, and what may be on its way on the lanes, if there are several.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from rpc.errors import ProtocolError
from rpc.runtime.blocking import wait_while

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
    "Target",
    "allocate",
]

WHOLE_BYTES: Final = 256 << 10
"""Up to this many bytes, a message is one frame."""

CHUNK_BYTES: Final = 512 << 10
"""How much of a message goes out at a time, where nothing small has been in its way lately."""

SHORT_CHUNK_BYTES: Final = 128 << 10
"""How much else: the most that small messages wait for which follow each other. Chunks begin at multiples of
it.
"""

_SHORT_FOR_BYTES: Final = 64 << 20
"""So much goes out in short chunks after a small message: on a network of 10 Gbit/s, in some 50 ms."""

MAX_OPEN: Final = 64
"""How many messages a peer may have begun and not finished, for each lane."""

MAX_BUFFERS: Final = 1 << 20
"""How many buffers all open messages may have together, and any message alone."""

_UNDER_WAY_BYTES: Final = 32 << 20
"""What queues and kernels may hold back on one of several lanes."""

_KEPT_BYTES: Final = 4 << 10
"""Number of bytes kept of an incomplete message's first buffer, which begins with ids in some kinds."""

_SENT_AT_ONCE: Final = 8
_OWN_MEMORY_BYTES: Final = 128 << 10
_PAGE_BACKED_BYTES: Final = 4 << 20


class ChunkedMessage:
    """A large message on its way out: its opening frame, its number, and the buffers that follow in chunks,
    contiguous, referenced and not copied; ``size`` is the sum of their lengths.
    """

    def __init__(self, head: bytes, number: int, pieces: Sequence[Any], size: int) -> None:
        self.head = head
        self.number = number
        self.size = size
        self.unsent = size
        self.lanes: set[int] = set()
        """Where it has been opened."""
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
        """Put ``capture(piece)`` in place of every piece that is not sent yet."""
        self._pieces = deque(map(capture, self._pieces))


class Outgoing:
    """The large messages to one peer that are not sent yet. From any thread.

    Args:
        chunk_prefix: makes the prefix of a chunk, of the message's number, the chunk's offset and length.
        queue_limit: callers wait while more bytes than this are to be sent.

    Attributes:
        max_bytes: how much the peer lets be open at a time; one message may always be.
        unsent: bytes that no chunk has taken yet.
        other_lanes: what wakes each lane but the first, where there may be something for it.
    """

    def __init__(
        self, chunk_prefix: Callable[[int, int, int], bytes], max_bytes: int, queue_limit: int
    ) -> None:
        self.max_bytes = max_bytes
        self.unsent = 0
        self.other_lanes: list[Callable[[], object]] = []
        self._chunk_prefix = chunk_prefix
        self._queue_limit = queue_limit
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._room = threading.Condition(self._lock)
        self._waiting: deque[ChunkedMessage] = deque()
        self._open: deque[ChunkedMessage] = deque()
        self._sent = 0
        self._short_until = 0
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    def has_for(self, lane: int) -> bool:
        """Whether there is a chunk for a lane now: each message is begun on the first."""
        return bool(self._open or (self._waiting and lane == 0))

    def wait_for_room(self, deadline: float) -> bool:
        """Wait while too much is to be sent; false if that is so at ``deadline`` still."""
        with self._lock:
            return wait_while(self.is_full, self._room, deadline)

    def is_full(self) -> bool:
        """Whether too much is to be sent."""
        return self.unsent > self._queue_limit and not self._closed

    def add(self, message: ChunkedMessage) -> bool:
        """Send a message too, or what is left of it; it is opened when its turn comes. False if nothing can
        be sent any more.
        """
        with self._lock:
            if self._closed:
                return False
            self.unsent += message.unsent
            if message.lanes:
                self._open.append(message)
            else:
                self._waiting.append(message)
        return True

    def shorten(self) -> None:
        """Something small waits behind a chunk: have the next ones short, for a while."""
        self._short_until = self._sent + _SHORT_FOR_BYTES

    def next(self, lane: int) -> list[Any]:
        """What goes out next on a lane: a chunk with its prefix, behind the opening if it is the lane's first
        of its message; empty if there is nothing.
        """
        with self._lock:
            begins = lane == 0 and self._begin_next()
            if not self._open:
                return []
            message = self._open[0]  # which stays there, as others look whether there is one
            before = message.unsent
            pieces = self.chunk(message, lane)
            self.unsent -= before - message.unsent
            self._room.notify_all()
            if message.unsent:
                self._open.rotate(-1)
            else:
                self._open.popleft()
        if begins or not self:  # which the end of a lane waits for
            for wake in self.other_lanes:
                wake()
        return pieces

    def _begin_next(self) -> bool:
        """Whether the next message that waits may be sent now, and has its turn."""
        if not self._waiting or len(self._open) >= _SENT_AT_ONCE:
            return False
        open_bytes = sum(message.size for message in self._open)
        if self._open and open_bytes + self._waiting[0].size > self.max_bytes:
            return False
        self._open.appendleft(self._waiting[0])
        self._waiting.popleft()
        return True

    def chunk(self, message: ChunkedMessage, lane: int) -> list[Any]:
        """The next chunk of a message, which need not have been added."""
        count = min(SHORT_CHUNK_BYTES if self._sent < self._short_until else CHUNK_BYTES, message.unsent)
        self._sent += count
        prefix = self._chunk_prefix(message.number, message.size - message.unsent, count)
        if lane not in message.lanes:
            message.lanes.add(lane)
            prefix = message.head + prefix
        # Views: what is ``bytes`` in a queue is a message of its own.
        return [memoryview(prefix), *(memoryview(piece) for piece in message.take(count))]

    def close(self) -> None:
        """Forget everything: nothing more can be sent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._open.clear()
            self.unsent = 0
            self._room.notify_all()


@dataclass(frozen=True, slots=True)
class Room:
    """Where a buffer lies in its message: its length, and that with the padding behind it, in bytes."""

    length: int
    padded: int


_HUGE_PAGES: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
"""Touching fresh memory takes longer than filling it; of huge pages, a third of that (measured).

Smaller blocks come from the allocator, which keeps what was freed (see ``process_tuning``), uncleared: 1 MB
arrives in 0.9 ms then, and in 1.4 ms in fresh pages of the usual size (measured).
"""


def allocate(length: int) -> memoryview:
    """Writable memory, which nobody has cleared; large blocks come as fresh pages.

    It is private to this process: in a forked child, tensors over it are its own.
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
    """The buffers of a message for which there was no memory: of the first one its beginning, of the others
    nothing.

    Attributes:
        size: bytes that all buffers have.
        reason: why they could not be kept.
    """

    def __init__(self, buffers: Sequence[memoryview], size: int, reason: str) -> None:
        super().__init__(buffers)
        self.size = size
        self.reason = reason


class Target:
    """Where a message goes that somebody has memory ready for; one that is taken back goes elsewhere.

    Args:
        buffers: writable; what the message has behind its first buffer fills them, one after the other, and
            has their size.

    Attributes:
        lock: held by who writes to them.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.lock = threading.RLock()
        self.is_taken_back = False
        self._message: ArrivingMessage | None = None

    def is_of(self, buffers: list[memoryview]) -> bool:
        """Whether these are the buffers of the message that came for this target."""
        return self._message is not None and self._message.buffers is buffers

    def attach(self, message: ArrivingMessage) -> None:
        """This message begins to come. Where the target was taken back just now, it goes elsewhere."""
        with self.lock:
            self._message = message
            if self.is_taken_back:
                message.move()

    def take_back(self) -> None:
        """When this returns, nothing is written to the buffers any more: the message has memory of its own,
        with all that has come of it. From any thread; takes as long as copying does. Where there is no memory
        for it, it raises ``ProtocolError``, and all is as before.
        """
        with self.lock:
            if self._message is not None:
                self._message.move()
            self.is_taken_back = True


class ArrivingMessage:
    """An open message: its memory, and which cells of ``SHORT_CHUNK_BYTES`` have begun to come.

    Small neighbours among its buffers share a block of memory, every other buffer has its own.
    """

    def __init__(
        self,
        what: Any,
        rooms: Sequence[Room],
        lead: int,
        lane: int,
        allocate: Callable[[int], memoryview],
        target: Target | None,
    ) -> None:
        self.what = what
        self.size = self.left = sum(room.padded for room in rooms)
        self.rooms = len(rooms)
        """How many buffers it has where it comes from; those of a target may be divided otherwise."""
        self.lanes = {lane}
        self.begun = bytearray(-(-self.size // SHORT_CHUNK_BYTES))
        self.buffers: list[memoryview] = []
        """Of the message; this very list, also when they change."""
        self.target = target
        """Where it goes, unless that was taken back."""
        self._rooms, self._lead, self._allocate = rooms, lead, allocate
        try:
            self._find_memory(target)
        except NoMemory as error:
            self._use_none(str(error))

    def _find_memory(self, target: Target | None) -> None:
        rooms = self._rooms
        if target is None:
            self._use(*self._own_memory(rooms))
        else:
            buffers, memory = self._own_memory(rooms[:1])
            self._use([*buffers, *target.buffers], memory + self._memory_of(target))
            target.attach(self)

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
        """With the lock of the target: let go of it."""
        if self.target is None:
            return
        before, own = self._memory, self._own_memory(self._rooms)
        self.target = None
        self._use(*own)
        offset = 0
        for part in before:
            self._write(offset, part)
            offset += len(part)

    def room(self, offset: int, length: int) -> memoryview:
        """The memory for bytes from ``offset`` on: for at least one, and at most ``length`` of them."""
        index = bisect_right(self._ends, offset)
        memory = self._memory[index]
        start = offset - (self._ends[index] - len(memory))
        return memory[start : start + length]

    def fill(self, offset: int, data: memoryview) -> None:
        """Some bytes have come."""
        target = self.target
        with nullcontext() if target is None else target.lock:
            self._write(offset, data)

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            room = self.room(offset, len(data))
            room[:] = data[: len(room)]
            offset += len(room)
            data = data[len(room) :]


class Reassembly:
    """Puts the chunks together that come from one peer, on one lane or several. For one thread.

    Args:
        allocate: gives writable memory.
        lanes: how many there may be.

    Attributes:
        find_target: says where a message goes, of its kind, its call id and the sizes of its buffers.
        promised: bytes of open messages that are still to come.
        open_messages: by number.
    """

    def __init__(self, allocate: Callable[[int], memoryview], lanes: int = 1) -> None:
        self.find_target: Callable[[int, int, Sequence[int]], Target | None] = _no_target
        self.promised = 0
        self.lanes = lanes
        self.open_messages: dict[int, ArrivingMessage] = {}
        self._allocate = allocate
        self._buffers = 0

    def __bool__(self) -> bool:
        return bool(self.open_messages)

    @property
    def leeway(self) -> int:
        """How many bytes more than its limit a peer may promise: lanes do not keep each other's order."""
        return _UNDER_WAY_BYTES * self.lanes if self.lanes > 1 else 0

    def open_again(self, number: int, lane: int) -> None:
        """An open message is opened on another lane too. Raises ``ProtocolError`` if it is the same."""
        lanes = self.open_messages[number].lanes
        if lane in lanes:
            raise ProtocolError(f"message {number} was opened twice")
        lanes.add(lane)

    def open(
        self,
        number: int,
        what: Any,
        rooms: Sequence[Room],
        lead: int = 0,
        lane: int = 0,
        target: Target | None = None,
    ) -> None:
        """A message begins, with this number in its chunks.

        Args:
            what: returned with its buffers when it is complete.
            lead: how far from an alignment boundary its first buffer starts.
            lane: where its opening came.
            target: where its buffers from the second on go, which have its size in all.

        Raises:
            ProtocolError: too many messages are open, or they have too many buffers, or nothing is to follow.
        """
        if len(self.open_messages) >= MAX_OPEN * self.lanes:
            raise ProtocolError(f"more than {MAX_OPEN} messages are open at a time")
        if self._buffers + len(rooms) > MAX_BUFFERS:
            raise ProtocolError(f"the open messages have more than {MAX_BUFFERS} buffers")
        if not any(room.padded for room in rooms):
            raise ProtocolError("a message in chunks has nothing in them")
        message = ArrivingMessage(what, rooms, lead, lane, self._allocate, target)
        self.open_messages[number] = message
        self._buffers += len(rooms)
        self.promised += message.size

    def begin(self, number: int, offset: int, length: int) -> ArrivingMessage:
        """A chunk begins; returns its message. ``ProtocolError`` if there is no such chunk to come."""
        message = self.open_messages.get(number)
        if message is None:
            raise ProtocolError(f"a chunk belongs to message {number}, which is not open")
        end = offset + length
        first, beside = divmod(offset, SHORT_CHUNK_BYTES)
        if beside or not length or end > message.size or (end % SHORT_CHUNK_BYTES and end != message.size):
            raise ProtocolError(f"no chunk of {length} bytes is at {offset} in a message of {message.size}")
        cells = slice(first, -(-end // SHORT_CHUNK_BYTES))
        if any(message.begun[cells]):
            raise ProtocolError(f"the chunk at {offset} of message {number} has come twice")
        message.begun[cells] = b"\1" * (cells.stop - cells.start)
        return message

    def filled(self, number: int, length: int) -> tuple[Any, list[memoryview]] | None:
        """A chunk has arrived, all of it; returns ``what`` and the buffers of its message, if it is complete
        now.
        """
        message = self.open_messages.get(number)
        if message is None:  # forgotten in the middle of this chunk, which has come on another lane
            return None
        message.left -= length
        self.promised -= length
        if message.left:
            return None
        del self.open_messages[number]
        self._buffers -= message.rooms
        return message.what, message.buffers

    def clear(self) -> None:
        """Forget everything: nothing more will come, but the rest of a chunk on each other lane."""
        if self.lanes == 1:  # else targets may still be written to: who takes them back has that moved
            for message in self.open_messages.values():
                message.target = None
        self.open_messages.clear()
        self._buffers = self.promised = 0


def _no_target(kind: int, call_id: int, sizes: Sequence[int]) -> None:
    return None
