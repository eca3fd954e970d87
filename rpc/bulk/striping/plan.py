"""How a large message is spread over stripes, and put together again: without I/O.

A message is *opened* by a frame on the connection that the stripes belong to, which has its number, prefix,
table and header. What follows these in the message is cut every ``CHUNK_BYTES``. A chunk is preceded by the
message's number, where it begins in the message and its length, so chunks may take any stripe and arrive in
any order. Where they begin and end is not for the sender to choose: so no two overlap that are not the same.

Messages are numbered from 0 and opened in that order. But a chunk may arrive before the message is open: the
connections are independent. Then it has to wait, and so has all that is behind it on its stripe.

What a peer may have open is limited, as in ``rpc.wire.chunking``, and apart from what comes in chunks on the
connection itself. A sender stops counting a message once its last chunk has been given to a stripe; the
receiver counts it until that has arrived. So the receiver *parks* openings for which there is no room yet. It
cannot come to a standstill over this. Let k be the first message that is parked. All chunks that were given
out before k was opened are of messages before k, which are open here, and on each stripe they are ahead of
all chunks of k and of later messages; so they arrive. Then only such messages before k are still open as the
sender had not given out wholly when it opened k; and k fits beside these, for else it would not have been
opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, Final, NamedTuple

from rpc.errors import ProtocolError
from rpc.wire.chunking import MAX_OPEN, MAX_SEGMENTS, ChunkedMessage, Room, lay_out

__all__ = ["CHUNK_BYTES", "HEADER_BYTES", "MAX_PARKED", "Arrivals", "Chunk", "Outgoing", "unpack_header"]

CHUNK_BYTES: Final = 256 << 10
"""Where messages are cut. On a slow stripe, the end of a message waits for this much at most."""

MAX_PARKED: Final = 1024
"""How many messages may wait to be opened: more than kernels keep under way (each has over a megabyte)."""

_SENT_AT_ONCE: Final = 8
"""How many messages take turns."""

_HEADER: Final = Struct("<QQI")
HEADER_BYTES: Final = _HEADER.size


def unpack_header(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """What precedes a chunk: the number of its message, where it begins in that, its length."""
    number, offset, length = _HEADER.unpack(data)
    return number, offset, length


class Chunk(NamedTuple):
    """What goes out on one stripe.

    Attributes:
        opening: the message that is to be opened before, as its number and the opening's content; or None.
        pieces: the buffers to send, in order, with the chunk's header.
    """

    opening: tuple[int, bytes] | None
    pieces: list[Any]


class Outgoing:
    """The messages that are not yet sent over the stripes to one peer.

    Only ``add`` may be called while another thread is in any other method.

    Args:
        max_bytes: how much the peer lets be open at a time; one message may always be.
    """

    __slots__ = ("_max_bytes", "_next_number", "_open", "_waiting")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._next_number = 0
        self._waiting: deque[tuple[Sequence[Any], int]] = deque()
        self._open: deque[ChunkedMessage] = deque()

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    def add(self, pieces: Sequence[Any], size: int) -> None:
        """Send a message too.

        Args:
            pieces: what ``wire.encode`` returned, with segments that are not empty.
            size: the sum of their lengths in bytes.
        """
        self._waiting.append((pieces, size))

    def next(self) -> Chunk | None:
        """The chunk that goes next, of each open message one in turn; None if there is nothing to send."""
        opening = self._open_next()
        if not self._open:
            return None
        message = self._open.popleft()
        offset = message.size - message.unsent
        length = min(CHUNK_BYTES, message.unsent)
        pieces = [_HEADER.pack(message.number, offset, length), *message.take(length)]
        if message.unsent:
            self._open.append(message)
        return Chunk(opening, pieces)

    def _open_next(self) -> tuple[int, bytes] | None:
        if not self._waiting or len(self._open) >= _SENT_AT_ONCE:
            return None
        pieces, size = self._waiting[0]
        head = bytes(pieces[0])
        size -= len(head)
        if self._open and sum(message.size for message in self._open) + size > self._max_bytes:
            return None
        self._waiting.popleft()
        message = ChunkedMessage(head, self._next_number, pieces[1:], size)
        self._next_number += 1
        self._open.appendleft(message)
        return message.number, head

    def clear(self) -> None:
        """Forget everything: nothing more can be sent."""
        self._waiting.clear()
        self._open.clear()


class _Arriving:
    """An open message: its memory, and which of its chunks have begun."""

    __slots__ = ("_ends", "_memory", "begun", "left", "segments", "size", "what")

    def __init__(self, what: Any, size: int, segments: list[memoryview], memory: list[memoryview]) -> None:
        self.what = what
        self.size = size
        self.left = size
        self.segments = segments
        self.begun = bytearray(-(-size // CHUNK_BYTES))
        self._memory = memory
        self._ends = list(accumulate(map(len, memory)))

    def part(self, offset: int, length: int) -> list[memoryview]:
        """The memory for ``length`` bytes from ``offset`` on."""
        parts: list[memoryview] = []
        index = bisect_right(self._ends, offset)
        start = offset - (self._ends[index] - len(self._memory[index]))
        while length:
            part = self._memory[index][start : start + length]
            parts.append(part)
            length -= len(part)
            index, start = index + 1, 0
        return parts


class _Parked(NamedTuple):
    what: Any
    size: int
    rooms: Sequence[Room]
    lead: int


class Arrivals:
    """Puts together the messages that arrive over the stripes from one peer.

    Args:
        max_bytes: how much may be open at a time; one message may always be.
        allocate: gives writable memory.
    """

    __slots__ = ("_allocate", "_max_bytes", "_next_number", "_open", "_parked", "_promised", "_segments")

    def __init__(self, max_bytes: int, allocate: Callable[[int], memoryview]) -> None:
        self._max_bytes = max_bytes
        self._allocate = allocate
        self._open: dict[int, _Arriving] = {}
        self._parked: deque[_Parked] = deque()
        self._next_number = 0  # of the message that will be opened, or parked, next
        self._promised = 0
        self._segments = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._parked)

    def open(self, number: int, what: Any, rooms: Sequence[Room], lead: int = 0) -> None:
        """A message is opened; it is parked while there is no room for it.

        Args:
            number: its number.
            what: returned with its segments when it is complete.
            rooms: its segments, in order.
            lead: how far from an alignment boundary its first segment starts.

        Raises:
            ProtocolError: it is not the next in order, or nothing is to follow, or too many are parked, or
                all have too many segments together.
        """
        if number != self._next_number:
            raise ProtocolError(
                f"message {number} was opened over stripes, where {self._next_number} is next"
            )
        size = sum(room.padded for room in rooms)
        if not size:
            raise ProtocolError("a message over stripes has nothing in it")
        if len(self._parked) >= MAX_PARKED:
            raise ProtocolError(f"more than {MAX_PARKED} messages over stripes wait to be opened")
        if self._segments + len(rooms) > MAX_SEGMENTS:
            raise ProtocolError(f"the messages over stripes have more than {MAX_SEGMENTS} segments")
        self._segments += len(rooms)
        self._next_number += 1
        self._parked.append(_Parked(what, size, rooms, lead))
        self._open_parked()

    def _open_parked(self) -> None:
        while self._parked and self._has_room(self._parked[0].size):
            number = self._next_number - len(self._parked)
            what, size, rooms, lead = self._parked.popleft()
            self._open[number] = _Arriving(what, size, *lay_out(rooms, lead, self._allocate))
            self._promised += size

    def _has_room(self, size: int) -> bool:
        if not self._open:
            return True
        return len(self._open) < MAX_OPEN and self._promised + size <= self._max_bytes

    def begin(self, number: int, offset: int, length: int) -> list[memoryview] | None:
        """A chunk begins.

        Returns:
            Where its bytes go, in order; None if its message is not open yet, so that it has to wait.

        Raises:
            ProtocolError: there is no such message, or no such chunk of it, or it has come before.
        """
        message = self._open.get(number)
        if message is None:
            if number >= self._next_number + MAX_PARKED:
                raise ProtocolError(f"a chunk of message {number}, where {self._next_number} is next")
            if number < self._next_number - len(self._parked):
                raise ProtocolError(f"a chunk of message {number}, which is complete")
            return None
        index, beside = divmod(offset, CHUNK_BYTES)
        if beside or offset >= message.size or length != min(CHUNK_BYTES, message.size - offset):
            raise ProtocolError(
                f"no chunk of {length} bytes begins at {offset} in message {number} of {message.size} bytes"
            )
        if message.begun[index]:
            raise ProtocolError(f"the chunk at {offset} of message {number} has come twice")
        message.begun[index] = True
        return message.part(offset, length)

    def filled(self, number: int, length: int) -> tuple[Any, list[memoryview]] | None:
        """A chunk of ``length`` bytes has arrived, all of it.

        Returns:
            ``what`` and the segments of the message, if it is complete now. There may be room for others
            then: ``begin`` can be called again for chunks that wait.
        """
        message = self._open[number]
        message.left -= length
        if message.left:
            return None
        del self._open[number]
        self._promised -= message.size
        self._segments -= len(message.segments)
        self._open_parked()
        return message.what, message.segments

    def clear(self) -> None:
        """Forget everything: nothing more will come."""
        self._open.clear()
        self._parked.clear()
