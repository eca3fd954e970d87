"""Large messages in chunks, so that small ones need not wait for them: without I/O.

A message of more than ``WHOLE_BYTES`` travels as a series of frames. *Opening* numbers it and brings its
prefix, table and header; *chunks* bring what follows these in the message, its buffers and the padding
between, each saying where in the message it belongs. The chunks of several messages may alternate, and any
other frame may come between them. Where two workers have bulk streams (``rpc.bulk.streams``), the chunks of
the largest messages travel there instead, and their threads fill the same reassembly.

``Outgoing`` says which chunk goes next: of each open message one in turn. Chunks are long, which costs less,
until something small has had to wait behind one; then they are short for a while. ``Reassembly`` says where
the bytes of a chunk go: straight to where they stay. Each larger buffer gets memory of its own, so that a
tensor can be made over it without keeping the rest of the message alive; or the message goes to a ``Target``,
memory that somebody has ready for it.

If there is no memory for a message, its chunks are dropped as they come, and it arrives ``Incomplete``: with
its header, and without its buffers. So only what needs them fails, and the connection goes on.

What a peer may promise is limited: ``MAX_OPEN`` messages at a time, of which no more is still to come than
the largest message that is accepted. Each bulk stream adds to both, since streams do not keep each other's
order.
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
from threading import get_ident
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
"""Maximum number of messages that a peer has begun and not finished, for the connection and each stream."""

MAX_BUFFERS: Final = 1 << 20
"""How many buffers all open messages may have together, and any message alone."""

_UNDER_WAY_BYTES: Final = 32 << 20
"""Number of bytes that kernels may hold back on one stream."""

_OPENING_SECONDS: Final = 60.0
"""Seconds that the opening of a message may take to come on the connection when a chunk is there."""

_KEPT_BYTES: Final = 4 << 10
"""Number of bytes kept of an incomplete message's first buffer, which begins with ids in some kinds."""

_SENT_AT_ONCE: Final = 8
_OWN_MEMORY_BYTES: Final = 128 << 10
_PAGE_BACKED_BYTES: Final = 4 << 20


class ChunkedMessage:
    """A large message on its way out: its opening frame, its number, and the buffers that follow in chunks,
    contiguous, referenced and not copied; ``size`` is the sum of their lengths, ``kind`` that of its frame.
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
    """

    def __init__(
        self, chunk_prefix: Callable[[int, int, int], bytes], max_bytes: int, queue_limit: int
    ) -> None:
        self.max_bytes = max_bytes
        self.unsent = 0
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
            if message.is_open:
                self._open.append(message)
            else:
                self._waiting.append(message)
        return True

    def shorten(self) -> None:
        """Something small waits behind a chunk: have the next ones short, for a while."""
        self._short_until = self._sent + _SHORT_FOR_BYTES

    def next(self) -> list[Any]:
        """What goes out next: a chunk with its prefix, behind the opening if it is the first of its message;
        empty if there is nothing.
        """
        with self._lock:
            self._begin_next()
            if not self._open:
                return []
            message = self._open[0]  # which stays there, as others look whether there is one
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
        """Give the next message that waits its turn, if it may be sent now."""
        if not self._waiting or len(self._open) >= _SENT_AT_ONCE:
            return
        open_bytes = sum(message.size for message in self._open)
        if not self._open or open_bytes + self._waiting[0].size <= self.max_bytes:
            self._open.appendleft(self._waiting[0])
            self._waiting.popleft()

    def chunk(self, message: ChunkedMessage) -> list[Any]:
        """The next chunk of a message, which need not have been added."""
        count = min(SHORT_CHUNK_BYTES if self._sent < self._short_until else CHUNK_BYTES, message.unsent)
        self._sent += count
        prefix = self._chunk_prefix(message.number, message.size - message.unsent, count)
        if not message.is_open:
            message.is_open = True
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

    Threads write to the buffers within ``writing``, several at once to different places.

    Args:
        buffers: writable; what the message has behind its first buffer fills them, one after the other, and
            has their size.

    Attributes:
        writers: the threads that write to the buffers right now, by identifier.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.is_taken_back = False
        self._changed = threading.Condition()
        self.writers: dict[int, None] = {}
        self._is_wanted = False
        self._message: ArrivingMessage | None = None

    def is_of(self, buffers: list[memoryview]) -> bool:
        """Whether these are the buffers of the message that came for this target."""
        return self._message is not None and self._message.buffers is buffers

    def attach(self, message: ArrivingMessage) -> None:
        """This message begins to come. Where the target was taken back just now, it goes elsewhere."""
        with self._changed:
            self._message = message
            if self.is_taken_back:
                message.move()

    def enter(self) -> None:
        """The current thread is about to write to the buffers, and calls ``leave`` soon."""
        with self._changed:
            while self._is_wanted:
                self._changed.wait()
            self.writers[get_ident()] = None

    def leave(self) -> None:
        """The current thread writes no more."""
        with self._changed:
            self.writers.pop(get_ident(), None)
            if self._is_wanted:
                self._changed.notify_all()

    def take_back(self) -> None:
        """When this returns, nothing is written to the buffers any more: the message has memory of its own,
        with all that has come of it. From any thread; takes as long as copying does. Where there is no memory
        for it, it raises ``ProtocolError``, and all is as before.
        """
        with self._changed:
            self._is_wanted = True
            try:
                while self.writers.keys() - {get_ident()}:  # a finalizer may run in a thread that writes
                    self._changed.wait()
                if self._message is not None:
                    self._message.move()
                self.is_taken_back = True
            finally:
                self._is_wanted = False
                self._changed.notify_all()


class ArrivingMessage:
    """An open message: its memory, and which cells of ``SHORT_CHUNK_BYTES`` have begun to come.

    Small neighbours among its buffers share a block of memory, every other buffer has its own.
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
        """How many buffers it has where it comes from; those of a target may be divided otherwise."""
        self.is_dropped = False
        """Whether the rest of it will not come, and what comes belongs nowhere."""
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
        """The memory for bytes from ``offset`` on: for at least one, and at most ``length`` of them."""
        index = bisect_right(self._ends, offset)
        memory = self._memory[index]
        start = offset - (self._ends[index] - len(memory))
        return memory[start : start + length]

    def fill(self, offset: int, data: memoryview) -> None:
        """Some bytes have come."""
        with self.writing():
            self._write(offset, data)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While somebody writes to where ``room`` says: that is not taken back meanwhile."""
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
    """Puts the chunks together that come from one peer, on the connection and on bulk streams. From any
    thread.

    Args:
        allocate: gives writable memory.

    Attributes:
        find_target: says where a message goes, of its kind, its call id and the sizes of its buffers.
        streams: number of bulk streams on which chunks may come.
        promised: bytes of open messages that are still to come.
        open_messages: by number.
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
        """How many bytes more than its limit a peer may promise."""
        return _UNDER_WAY_BYTES * self.streams

    def open(
        self,
        number: int,
        what: Any,
        rooms: Sequence[Room],
        lead: int = 0,
        target: Target | None = None,
    ) -> None:
        """A message begins, with this number in its chunks.

        Args:
            what: returned with its buffers when it is complete.
            lead: how far from an alignment boundary its first buffer starts.
            target: where its buffers from the second on go, which have its size in all.

        Raises:
            ProtocolError: it is open already, or too many messages are, or they have too many buffers, or
                nothing is to follow.
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
            if number in self.open_messages:  # meanwhile, on another stream
                raise ProtocolError(f"message {number} was opened twice")
            message.is_dropped = self._is_cleared
            self.open_messages[number] = message
            self._buffers += len(rooms)
            self.promised += message.size
            self._opened.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until a message is open, on another connection than that of the chunk which has come.
        ``ProtocolError`` if it does not come.
        """
        if number in self.open_messages:
            return
        with self._opened:
            there = self._opened.wait_for(
                lambda: self._is_cleared or number in self.open_messages, _OPENING_SECONDS
            )
        if not there or self._is_cleared:
            raise ProtocolError(f"a chunk belongs to message {number}, which is not open")

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
        with self._opened:
            if any(message.begun[cells]):
                raise ProtocolError(f"the chunk at {offset} of message {number} has come twice")
            message.begun[cells] = b"\1" * (cells.stop - cells.start)
        return message

    def filled(self, number: int, length: int) -> tuple[Any, list[memoryview]] | None:
        """A chunk has arrived, all of it; returns ``what`` and the buffers of its message, if it is complete
        now.
        """
        with self._opened:
            message = self.open_messages.get(number)
            if message is None:  # forgotten in the middle of this chunk
                return None
            message.left -= length
            self.promised -= length
            if message.left:
                return None
            del self.open_messages[number]
            self._buffers -= message.rooms
        return message.what, message.buffers

    def clear(self) -> None:
        """Forget everything: nothing more will come, but the rest of a chunk on each stream."""
        with self._opened:
            self._is_cleared = True
            for message in self.open_messages.values():
                message.is_dropped = True
            self.open_messages.clear()
            self._buffers = self.promised = 0
            self._opened.notify_all()


def _no_target(kind: int, call_id: int, sizes: Sequence[int]) -> None:
    return None
