"""A message in a segment: how its buffers lie there, and the frame that says so.

Buffers lie one after the other, each aligned for any instruction. The frame has no header and one segment, as
the most frequent frames do, so that it goes the same short ways. All integers are little-endian::

    kind u8, 1 if there is a header u8, 2 x 0, number of buffers u32, number of the segment u64, use u64
    length u64 of every buffer
    length u32 of the header, and the header, one msgpack map: if there is one
    the pickle
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, NamedTuple

from rpc.errors import ProtocolError
from rpc.wire.frames import MAX_BUFFERS, pack_header, unpack_header

__all__ = ["ALIGNMENT", "Message", "pack", "places", "unpack"]

ALIGNMENT: Final = 64

_PREFIX: Final = Struct("<BB2xIQQ")
_HEADER_LENGTH: Final = Struct("<I")

_USUAL: Final = Struct("<BB2xIQQQ")
"""All before the pickle of a message with one buffer and no header, as most are."""


_new: Final = tuple.__new__
"""Makes a named tuple without the Python function that it has for a constructor."""


class Message(NamedTuple):
    """What such a frame says.

    Attributes:
        kind, header, pickle: of the message, as if its buffers had come with it.
        number: the segment's.
        use: the number of the use.
        lengths: of the buffers.
    """

    kind: int
    header: dict[str, Any]
    number: int
    use: int
    lengths: Sequence[int]
    pickle: bytes | memoryview


def pack(message: Message) -> bytes:
    """The one segment of the frame for a message."""
    kind, header, number, use, lengths, pickle = message
    count = len(lengths)
    if count == 1 and not header:
        return _USUAL.pack(kind, False, 1, number, use, lengths[0]) + pickle
    begin = _PREFIX.pack(kind, bool(header), count, number, use) + Struct(f"<{count}Q").pack(*lengths)
    if not header:
        return b"".join((begin, pickle))
    packed = pack_header(header)
    return b"".join((begin, _HEADER_LENGTH.pack(len(packed)), packed, pickle))


def unpack(segment: Any) -> Message:
    """The reverse. Raises ``ProtocolError`` if that is no such frame."""
    view = memoryview(segment)
    try:
        kind, has_header, count, number, use = _PREFIX.unpack_from(view)
        if count == 1 and not has_header:
            length = _USUAL.unpack_from(view)[-1]
            return _new(Message, (kind, {}, number, use, (length,), view[_USUAL.size :]))
        if count > MAX_BUFFERS:
            raise ProtocolError(f"a message of {count} buffers is over the limit of {MAX_BUFFERS}")
        table = Struct(f"<{count}Q")
        lengths = table.unpack_from(view, _PREFIX.size)
        end = _PREFIX.size + table.size
        header: dict[str, Any] = {}
        if has_header:
            (length,) = _HEADER_LENGTH.unpack_from(view, end)
            begin = end + _HEADER_LENGTH.size
            end = begin + length
            if end > len(view):
                raise ProtocolError("the header of a message in a segment is cut short")
            header = unpack_header(view[begin:end])
    except struct_error as error:
        raise ProtocolError(f"a malformed message in a segment ({error})") from error
    return _new(Message, (kind, header, number, use, lengths, view[end:]))


def places(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these lengths begin, and how many bytes they take together."""
    if len(lengths) == 1:
        return [0], lengths[0]
    offsets: list[int] = []
    end = 0
    for length in lengths:
        begin = end + -end % ALIGNMENT
        offsets.append(begin)
        end = begin + length
    return offsets, end
