"""Large messages in chunks, so that small ones need not wait for them: without I/O.

A message of more than ``WHOLE_BYTES`` travels as a series of frames. *Opening* numbers it and brings its
prefix, table and header; *chunks* bring, in order, what follows these in the message, its segments and the
padding between; *cancelled* ends it early. The chunks of several messages may alternate, and any other
frame may come between them.

``Outgoing`` says which chunk goes next: of each open message one in turn. Chunks are long, which costs
less, until something small has had to wait behind one; then they are short for a while. ``Reassembly`` says
where the bytes of a chunk go: straight to where they stay. Each larger segment gets memory of its own, so
that a tensor can be made over it without keeping the rest of the message alive.

What a peer may promise is limited: ``MAX_OPEN`` messages at a time, whose chunks have together no more bytes
than the largest message that is accepted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rpc.errors import ProtocolError

__all__ = [
    "CHUNK_BYTES",
    "MAX_OPEN",
    "MAX_SEGMENTS",
    "SHORT_CHUNK_BYTES",
    "WHOLE_BYTES",
    "ChunkedMessage",
    "Outgoing",
    "Reassembly",
    "Room",
    "lay_out",
]

WHOLE_BYTES: Final = 256 << 10
"""Up to this many bytes, a message is one frame."""

CHUNK_BYTES: Final = 512 << 10
"""How much of a message goes out at a time, where nothing small has been in its way lately."""

SHORT_CHUNK_BYTES: Final = 128 << 10
"""How much else: the most that small messages wait for which follow each other."""

_SHORT_FOR_BYTES: Final = 64 << 20
"""So much goes out in short chunks after a small message: on a network of 10 Gbit/s, in some 50 ms."""

MAX_OPEN: Final = 64
"""How many messages a peer may have begun and not finished."""

MAX_SEGMENTS: Final = 1 << 20
"""How many segments all open messages may have together, and any message alone."""

_SENT_AT_ONCE: Final = 8
_OWN_MEMORY_BYTES: Final = 128 << 10
_ALIGNMENT: Final = 16

ChunkPrefix = Callable[[int, int], bytes]


class ChunkedMessage:
    """A large message on its way out.

    Args:
        head: the opening frame.
        number: of the message, in its chunks.
        pieces: what is to follow in chunks: contiguous buffers of bytes, referenced and not copied.
        size: the sum of their lengths in bytes.
    """

    __slots__ = ("_pieces", "head", "number", "size", "unsent")

    def __init__(self, head: bytes, number: int, pieces: Sequence[Any], size: int) -> None:
        self.head = head
        self.number = number
        self.size = size
        self.unsent = size
        self._pieces = deque(pieces)

    def take(self, count: int) -> list[Any]:
        """Remove the next ``count`` bytes, at most as many as there are; returns them as buffers."""
        taken: list[Any] = []
        self.unsent -= count
        while count:
            piece = self._pieces[0]
            length = len(piece)
            if length > count:
                view = memoryview(piece)
                taken.append(view[:count])
                self._pieces[0] = view[count:]
                break
            taken.append(self._pieces.popleft())
            count -= length
        return taken

    def replace(self, capture: Callable[[Any], Any]) -> None:
        """Put ``capture(piece)`` in place of every piece that is not sent yet."""
        self._pieces = deque(map(capture, self._pieces))


class Outgoing:
    """The large messages of one connection that are not sent yet. For one thread at a time.

    Only ``add``, ``shorten`` and ``finish_with`` may be called while another thread is in any other method.

    Args:
        chunk_prefix: makes the prefix of a chunk, of the message's number and the chunk's length.
        max_bytes: how much the peer lets be open at a time; one message may always be.
    """

    __slots__ = ("_chunk_prefix", "_last", "_open", "_sent", "_short_until", "_waiting", "max_bytes")

    def __init__(self, chunk_prefix: ChunkPrefix, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._chunk_prefix = chunk_prefix
        self._waiting: deque[ChunkedMessage] = deque()
        self._open: deque[ChunkedMessage] = deque()
        self._last: bytes | None = None
        # Who sends writes the one, who calls ``shorten`` the other: nothing that either says gets lost.
        self._sent = 0
        self._short_until = 0

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting or self._last is not None)

    def add(self, message: ChunkedMessage) -> None:
        """Send a message too; it is opened when its turn comes."""
        self._waiting.append(message)

    def shorten(self) -> None:
        """Something small waits behind a chunk: have the next ones short, for a while."""
        self._short_until = self._sent + _SHORT_FOR_BYTES

    def finish_with(self, frame: bytes) -> None:
        """Send a frame when all messages are sent."""
        self._last = frame

    def next(self) -> list[Any]:
        """What goes out next: a chunk with its prefix, after the opening if it is the first."""
        if self._waiting and len(self._open) < _SENT_AT_ONCE:
            promised = sum(message.size for message in self._open)
            if not self._open or promised + self._waiting[0].size <= self.max_bytes:
                self._open.appendleft(self._waiting.popleft())
        if not self._open:
            frame, self._last = self._last, None
            return [] if frame is None else [frame]
        message = self._open.popleft()
        pieces = self.chunk(message)
        if message.unsent:
            self._open.append(message)
        return pieces

    def chunk(self, message: ChunkedMessage) -> list[Any]:
        """The next chunk of a message, which need not have been added."""
        short = self._sent < self._short_until
        count = min(SHORT_CHUNK_BYTES if short else CHUNK_BYTES, message.unsent)
        self._sent += count
        prefix = self._chunk_prefix(message.number, count)
        if message.unsent == message.size:
            prefix = message.head + prefix
        return [prefix, *message.take(count)]

    def resume(self, message: ChunkedMessage) -> None:
        """Go on with a message of which ``chunk`` has been called."""
        if message.unsent:
            self._open.append(message)

    def clear(self) -> None:
        """Forget everything: nothing more can be sent."""
        self._waiting.clear()
        self._open.clear()
        self._last = None


@dataclass(frozen=True, slots=True)
class Room:
    """Where a segment lies in its message: its length, and that with the padding behind it, in bytes."""

    length: int
    padded: int


def lay_out(
    rooms: Sequence[Room], lead: int, allocate: Callable[[int], memoryview]
) -> tuple[list[memoryview], list[memoryview]]:
    """Allocate memory for a message: small neighbours share some, every other segment has its own.

    Args:
        rooms: its segments, in order.
        lead: how far from an alignment boundary the first one starts.
        allocate: gives writable memory.

    Returns:
        The segments, and the memory that the message fills, in order, with the padding between segments.
    """
    segments: list[memoryview] = []
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
        lead_here = lead if not first else 0
        block = allocate(lead_here + total)[lead_here:]
        if total:
            memory.append(block)
        start = 0
        for room in rooms[first:index]:
            segments.append(block[start : start + room.length])
            start += room.padded
    return segments, memory


@dataclass(slots=True)
class _Arriving:
    what: Any
    size: int
    left: int
    segments: list[memoryview]
    targets: deque[memoryview]


class Reassembly:
    """Puts the chunks of one connection together.

    After ``begin``, the chunk's bytes go to ``target()``, as many as it takes, and ``filled`` is told how
    many they were; so on until ``target()`` is empty: then the chunk is complete.

    Args:
        allocate: gives writable memory.
    """

    __slots__ = ("_allocate", "_chunk_left", "_current", "_messages", "_number", "promised")

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self.promised = 0
        """Bytes of all messages that are open."""
        self._allocate = allocate
        self._messages: dict[int, _Arriving] = {}
        self._current: _Arriving | None = None
        self._number = 0
        self._chunk_left = 0

    def __len__(self) -> int:
        return len(self._messages)

    def open(self, number: int, what: Any, rooms: Sequence[Room], lead: int = 0) -> None:
        """A message begins.

        Args:
            number: its number in chunks.
            what: returned with its segments when it is complete.
            rooms: its segments, in order.
            lead: how far from an alignment boundary its first segment starts.

        Raises:
            ProtocolError: too many messages are open, or one of this number is, or nothing is to follow.
        """
        if number in self._messages:
            raise ProtocolError(f"message {number} was opened twice")
        if len(self._messages) >= MAX_OPEN:
            raise ProtocolError(f"more than {MAX_OPEN} messages are open at a time")
        if sum(len(message.segments) for message in self._messages.values()) + len(rooms) > MAX_SEGMENTS:
            raise ProtocolError(f"the open messages have more than {MAX_SEGMENTS} segments")
        size = sum(room.padded for room in rooms)
        if not size:
            raise ProtocolError("a message in chunks has nothing in them")
        segments, memory = lay_out(rooms, lead, self._allocate)
        self._messages[number] = _Arriving(what, size, size, segments, deque(memory))
        self.promised += size

    def begin(self, number: int, length: int) -> None:
        """A chunk begins.

        Raises:
            ProtocolError: no such message is open, or it is shorter than that.
        """
        message = self._messages.get(number)
        if message is None:
            raise ProtocolError(f"a chunk belongs to message {number}, which is not open")
        if not 0 < length <= message.left:
            raise ProtocolError(f"a chunk of {length} bytes where {message.left} are left")
        self._current = message
        self._number = number
        self._chunk_left = length

    def target(self) -> memoryview:
        """Where the next bytes of the chunk go; empty when it is complete."""
        if self._current is None or not self._chunk_left:
            return memoryview(b"")
        return self._current.targets[0][: self._chunk_left]

    def filled(self, count: int) -> tuple[Any, list[memoryview]] | None:
        """Take note that ``count`` bytes were written to the start of ``target()``.

        Returns:
            ``what`` and the segments of the message, if it is complete now.
        """
        message = self._current
        assert message is not None
        target = message.targets.popleft()
        if count < len(target):
            message.targets.appendleft(target[count:])
        message.left -= count
        self._chunk_left -= count
        if message.left:
            return None
        self._current = None
        del self._messages[self._number]
        self.promised -= message.size
        return message.what, message.segments

    def cancel(self, number: int) -> None:
        """The rest of a message will not come. Raises ``ProtocolError`` if it is not open."""
        message = self._messages.pop(number, None)
        if message is None:
            raise ProtocolError(f"message {number} was cancelled, but is not open")
        if message is self._current:
            self._current = None  # else its memory would live until another chunk comes
        self.promised -= message.size

    def clear(self) -> None:
        """Forget everything: nothing more will come."""
        self._messages.clear()
        self._current = None
        self.promised = 0
