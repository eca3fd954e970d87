"""Large messages that arrive in chunks, reassembled in their final memory: without I/O. See ``chunking``."""

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
from rpc.wire.chunking import SHORT_CHUNK_BYTES
from rpc.wire.targets import MergingTarget, Target

__all__ = [
    "MAX_BUFFERS",
    "MAX_OPEN",
    "ArrivingMessage",
    "Incomplete",
    "NoMemory",
    "Reassembly",
    "Room",
    "allocate",
]

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

_OWN_MEMORY_BYTES: Final = 128 << 10
_PAGE_BACKED_BYTES: Final = 4 << 20


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


class NoMemory(ProtocolError, MemoryError):
    """The receiver cannot allocate what a frame or a message needs. Not a violation of the protocol; see
    ``is_violation``.
    """


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
            dropped, self.open_messages = self.open_messages, {}
            for message in dropped.values():
                message.is_dropped = True
            self._buffers = self.promised = 0
            self._opened.notify_all()


def _no_target(kind: int, call_id: int, sizes: Sequence[int]) -> None:
    return None
