"""The wire format: bytes to frames and back, without I/O.

A connection opens with an eight-byte *preamble* (magic and protocol version). Then frames follow each
other. All integers are little-endian::

    prefix    28 bytes   body length u64, call id u64, header length u32, buffer count u32, kind u8,
                         codec u8, 2 x 0
    table                length u64 of every buffer but the last, whose length is what remains
    header               one msgpack map; absent (length 0) when there is nothing to say
    buffer 0             the pickle, in messages that have one; the codec says what it is really
    buffer 1, 2, ...     tensor bytes, each starting at a multiple of 16 within the body

Of a message that is too large to be one frame, prefix, table and header are the body of a frame of kind
``OPENING``; the buffers follow in frames of kind ``CHUNK``. In both, the call id is the number of the message
between these two workers; a chunk's prefix has, in place of header length and buffer count, where in the
message it belongs (u64). ``chunking.py`` says more, and ``decoder.py`` is the receiving side.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import msgpack

from rpc.errors import ProtocolError
from rpc.wire.chunking import MAX_BUFFERS, ChunkedMessage

__all__ = [
    "MAX_BUFFERS",
    "MAX_HEADER_BYTES",
    "PREAMBLE",
    "PROTOCOL_VERSION",
    "Frame",
    "Kind",
    "chunk_offset",
    "chunk_prefix",
    "chunked",
    "decode_one",
    "encode",
    "encode_small",
    "pack_header",
]

PROTOCOL_VERSION: Final = 2
MAGIC: Final = b"farcall"
PREAMBLE: Final = MAGIC + bytes([PROTOCOL_VERSION])

MAX_HEADER_BYTES: Final = 64 << 20
ALIGNMENT: Final = 16

_PREFIX: Final = Struct("<QQIIBB2x")
_CHUNK_PREFIX: Final = Struct("<QQQBB2x")
PREFIX_BYTES: Final = _PREFIX.size
_ZEROS: Final = bytes(ALIGNMENT)
_ANY_TEXT: Final = "surrogatepass"  # texts of users' exceptions need not be valid Unicode

_packers: Final[list[Any]] = []
"""Those at rest: each has a buffer that takes longer to get than most headers to pack. Taking one out leaves
none to a finalizer, or another thread, that comes between."""

_new_frame: Final = tuple.__new__
"""Makes a named tuple without the Python function that it has for a constructor."""

_pack_prefix = _PREFIX.pack
unpack_prefix = _PREFIX.unpack_from


Prefix = tuple[int, int, int, int, int, int]
"""Body length, call id, header length, number of buffers, kind, codec."""


class Kind:
    """What a frame is. Kinds from ``EXTENSION`` on belong to what is built on the agent.

    Plain numbers and no ``Enum``, since they are compared for every frame.
    """

    HELLO: Final = 1
    WELCOME: Final = 2
    REFUSED: Final = 3
    GOODBYE: Final = 4
    CALL: Final = 5
    REPLY: Final = 6
    FAILURE: Final = 7
    CONTROL: Final = 8
    SHUTDOWN: Final = 9
    OPENING: Final = 10
    CHUNK: Final = 11
    SEGMENTS: Final = 13
    IN_SEGMENT: Final = 14
    LANES: Final = 15
    LANE: Final = 16
    BULK: Final = 18
    BULK_CREDIT: Final = 19
    CHALLENGE: Final = 20
    PROOF: Final = 21
    EXTENSION: Final = 32


class Frame(NamedTuple):
    """One message as it came off the wire.

    ``kind`` is a plain int, so that kinds of extensions need no registration here. ``codec`` says how the
    payload is encoded; see ``rpc.serialization``.
    """

    kind: int
    call_id: int
    header: dict[str, Any]
    buffers: list[Any]
    codec: int = 0


def padding_after(offset: int) -> int:
    """How many bytes lie between a buffer that ends at ``offset`` in its body and the next."""
    return -offset % ALIGNMENT


def encode(
    kind: int, call_id: int, header: dict[str, Any], buffers: Sequence[Any], codec: int = 0
) -> tuple[list[Any], int]:
    """Lay out one frame.

    Args:
        kind: what the frame is.
        call_id: the call that it belongs to, or 0.
        header: a map that msgpack can encode; an empty one takes no bytes.
        buffers: contiguous runs of bytes; they are referenced, not copied.
        codec: how the buffers are encoded.

    Returns:
        The pieces to send, in order, and the sum of their lengths in bytes.
    """
    packed_header: bytes = pack_header(header) if header else b""
    count = len(buffers)
    if len(packed_header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(packed_header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    if count > MAX_BUFFERS:
        raise ProtocolError(f"a frame of {count} buffers is over the limit of {MAX_BUFFERS}")
    if count <= 1:
        body = len(packed_header) + (len(buffers[0]) if count else 0)
        head = _pack_prefix(body, call_id, len(packed_header), count, kind, codec) + packed_header
        return ([head, buffers[0]] if count else [head]), PREFIX_BYTES + body
    lengths = [len(buffer) for buffer in buffers]
    table = Struct(f"<{count - 1}Q").pack(*lengths[:-1])
    offset = len(table) + len(packed_header) + lengths[0]
    pieces: list[Any] = [b"", buffers[0]]
    for buffer, length in zip(buffers[1:], lengths[1:], strict=True):
        padding = padding_after(offset)
        if padding:
            pieces.append(_ZEROS[:padding])
        if length:
            pieces.append(buffer)
        offset += padding + length
    pieces[0] = _pack_prefix(offset, call_id, len(packed_header), count, kind, codec) + table + packed_header
    return pieces, PREFIX_BYTES + offset


def encode_small(
    kind: int, call_id: int, header: dict[str, Any], buffers: Sequence[Any], codec: int = 0
) -> bytes:
    """A frame with at most one buffer, in one piece: the shape of most messages.

    Arguments are as for ``encode``.
    """
    packed: bytes = pack_header(header) if header else b""
    if not buffers:
        return _pack_prefix(len(packed), call_id, len(packed), 0, kind, codec) + packed
    pickle: bytes = buffers[0]
    return _pack_prefix(len(packed) + len(pickle), call_id, len(packed), 1, kind, codec) + packed + pickle


def chunked(buffers: Sequence[Any], size: int, number: int) -> ChunkedMessage:
    """What ``encode`` returned, to be sent in chunks; it must have buffers that are not empty."""
    head: bytes = buffers[0]
    opening = _pack_prefix(len(head), number, 0, 0, Kind.OPENING, 0) + head
    return ChunkedMessage(opening, number, buffers[1:], size - len(head))


def chunk_prefix(number: int, offset: int, length: int) -> bytes:
    """What precedes the ``length`` bytes of message ``number`` from ``offset`` on."""
    return _CHUNK_PREFIX.pack(length, number, offset, Kind.CHUNK, 0)


def chunk_offset(prefix: Prefix) -> int:
    """Where in its message a chunk with this prefix belongs."""
    return prefix[2] | prefix[3] << 32


def decode_one(data: bytearray) -> Frame:
    """The frame that ``data`` consists of, over that memory. Raises ``ProtocolError`` if it is not one."""
    view = memoryview(data)
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"{len(data)} bytes are too few for a frame")
    prefix = unpack_prefix(view)
    if prefix[0] != len(data) - PREFIX_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes says that its body has {prefix[0]}")
    check_layout(prefix)
    return build(prefix, view[PREFIX_BYTES:])


def check_layout(prefix: Prefix) -> None:
    """Raise ``ProtocolError`` if a body of this length cannot hold the header and the table of buffers."""
    body_length, _, header_length, count, _, _ = prefix
    if header_length > MAX_HEADER_BYTES or count > MAX_BUFFERS:
        raise ProtocolError(
            f"a frame of {count} buffers and a header of {header_length} bytes is over the limits "
            f"of {MAX_BUFFERS} and {MAX_HEADER_BYTES}"
        )
    table_length = table_bytes(count)
    if table_length + header_length > body_length:
        raise ProtocolError(
            f"a frame of {body_length} bytes cannot hold {count} buffers "
            f"and a header of {header_length} bytes"
        )


def build(prefix: Prefix, body: memoryview) -> Frame:
    """The frame of this prefix, over the memory of its body. Raises ``ProtocolError`` if it is malformed."""
    _, call_id, header_length, count, kind, codec = prefix
    if count == 1:
        if not header_length:
            return _new_frame(Frame, (kind, call_id, {}, [body], codec))
        header, buffer = unpack_header(body[:header_length]), body[header_length:]
        return _new_frame(Frame, (kind, call_id, header, [buffer], codec))
    table_length = table_bytes(count)
    offset = table_length + header_length
    header = unpack_header(body[table_length:offset]) if header_length else {}
    buffers: list[Any] = []
    for end in buffer_ends(body, len(body), offset, count):
        buffers.append(body[offset:end])
        offset = end + padding_after(end)
    return Frame(kind, call_id, header, buffers, codec)


def table_bytes(count: int) -> int:
    """How long the table of a frame is."""
    return 8 * (count - 1) if count > 1 else 0


def buffer_ends(table: memoryview, body_length: int, start: int, count: int) -> list[int]:
    """Where in its body each buffer ends; the first begins at ``start``.

    Args:
        table: begins with the lengths of all buffers but the last.
    """
    ends: list[int] = []
    offset = start
    for length in Struct(f"<{max(0, count - 1)}Q").unpack_from(table):
        end = offset + length
        ends.append(end)
        offset = end + padding_after(end)
        if end > body_length:
            break
    if offset > body_length:
        bad = len(ends) - (ends[-1] > body_length)
        raise ProtocolError(f"buffer {bad} of {count} ends beyond its frame of {body_length} bytes")
    if count:
        ends.append(body_length)
    elif offset != body_length:
        raise ProtocolError(f"{body_length - offset} bytes of a frame belong to no buffer")
    return ends


def pack_header(header: dict[str, Any]) -> bytes:
    """A header as it is sent."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(unicode_errors=_ANY_TEXT)
    packed: bytes = packer.pack(header)
    _packers.append(packer)
    return packed


def unpack_header(packed: memoryview) -> dict[str, Any]:
    """A frame's header. Raises ``ProtocolError`` if it is not a map in msgpack."""
    try:
        header = msgpack.unpackb(packed, strict_map_key=False, unicode_errors=_ANY_TEXT)
    except Exception as error:  # msgpack raises a handful of unrelated types for malformed input
        raise ProtocolError(f"a frame's header is not msgpack: {type(error).__name__} {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"a frame's header is a {type(header).__name__}, not a map")
    return header
