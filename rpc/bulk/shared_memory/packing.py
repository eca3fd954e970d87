"""Messages in a segment: the layout of their buffers, and the frame that refers to them.

The buffers follow each other, each aligned for any instruction. The frame has no header and one buffer, like
the most frequent frames, so that it is handled as fast as those. All integers are little-endian::

    kind u8, 1 if there is a header u8, 2 x 0, number of buffers u32, number of the segment u64, use u64
    length u64 of every buffer
    length u32 of the header, and the header, one msgpack map: if there is one
    the pickle
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, unpack_from
from struct import error as struct_error
from struct import pack as pack_struct
from typing import Any, Final, NamedTuple

from rpc.errors import ProtocolError
from rpc.wire.frames import new_tuple
from rpc.wire.headers import pack_header, unpack_header
from rpc.wire.reassembly import MAX_BUFFERS

__all__ = ["ALIGNMENT", "Message", "pack", "places", "unpack"]

ALIGNMENT: Final = 64

_PREFIX: Final = Struct("<BB2xIQQ")
_HEADER_LENGTH: Final = Struct("<I")


class Message(NamedTuple):
    """The content of such a frame: kind, header and pickle of the message, as if its buffers had been sent
    with it, the numbers of the segment and of its use, and the lengths of the buffers.
    """

    kind: int
    header: dict[str, Any]
    number: int
    use: int
    lengths: Sequence[int]
    pickle: bytes | memoryview


def pack(message: Message) -> bytes:
    """Return the one buffer of the frame for a message."""
    kind, header, number, use, lengths, pickle = message
    count = len(lengths)
    begin = pack_struct(f"<BB2xIQQ{count}Q", kind, bool(header), count, number, use, *lengths)
    if not header:
        return begin + pickle
    packed = pack_header(header)
    return b"".join((begin, _HEADER_LENGTH.pack(len(packed)), packed, pickle))


def unpack(buffer: Any) -> Message:
    """Parse the buffer of such a frame. Raises ``ProtocolError`` if it is malformed."""
    view = memoryview(buffer)
    try:
        kind, has_header, count, number, use = _PREFIX.unpack_from(view)
        if count > MAX_BUFFERS:
            raise ProtocolError(f"a message of {count} buffers is over the limit of {MAX_BUFFERS}")
        lengths = unpack_from(f"<{count}Q", view, _PREFIX.size)
        end = _PREFIX.size + 8 * count
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
    return new_tuple(Message, (kind, header, number, use, lengths, view[end:]))


def places(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of buffers of these lengths, and their total size in bytes."""
    offsets: list[int] = []
    end = 0
    for length in lengths:
        begin = end + -end % ALIGNMENT
        offsets.append(begin)
        end = begin + length
    return offsets, end
