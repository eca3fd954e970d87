"""The wire format: bytes to frames and back, without I/O.

A connection opens with an eight-byte *preamble* (magic and protocol version). Then frames follow each
other. All integers are little-endian::

    prefix    28 bytes   body length u64, call id u64, header length u32, buffer count u32, kind u8,
                         codec u8, 2 x 0
    table                length u64 of every buffer but the last, whose length is what remains
    header               one msgpack map; absent (length 0) if it is empty
    buffer 0             the pickle, in messages that have one, or what the codec puts in its place
    buffer 1, 2, ...     tensor bytes, each starting at a multiple of 16 within the body

Of a message that is too large to be one frame, prefix, table and header are the body of a frame of kind
``OPENING``; the buffers follow in frames of kind ``CHUNK``. In both, the call id is the number of the message
between these two workers; a chunk's prefix has, in place of header length and buffer count, where in the
message it belongs (u64). See ``chunking.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from struct import Struct, pack, unpack_from
from typing import Any, Final, NamedTuple

from rpc.errors import ProtocolError
from rpc.wire.chunking import WHOLE_BYTES, ChunkedMessage
from rpc.wire.headers import MAX_ENTRIES, check_entries, pack_header, unpack_header
from rpc.wire.reassembly import MAX_BUFFERS, Reassembly, Room
from rpc.wire.targets import MergingTarget

__all__ = [
    "CHUNK_KINDS",
    "MAGIC",
    "MAX_HEADER_BYTES",
    "PREAMBLE",
    "PREFIX_BYTES",
    "PROTOCOL_VERSION",
    "Frame",
    "Kind",
    "LargeFrame",
    "Prefix",
    "build_frame",
    "check_layout",
    "chunk_prefix",
    "chunked",
    "decode_one",
    "describe",
    "encode",
    "encode_small",
    "is_bulk",
    "large_frame",
    "new_tuple",
    "open_message",
    "read_prefix",
    "read_whole",
    "unpack_prefix",
]

PROTOCOL_VERSION: Final = 8
"""Version of the protocol; workers of different versions refuse each other."""

MAGIC: Final = b"farcall"
PREAMBLE: Final = MAGIC + bytes([PROTOCOL_VERSION])

MAX_HEADER_BYTES: Final = 64 << 20
"""Maximum size in bytes of a frame's header."""

ALIGNMENT: Final = 16
"""Alignment in bytes of buffers within a body."""

_PREFIX: Final = Struct("<QQIIBB2x")
_CHUNK_PREFIX: Final = Struct("<QQQBB2x")
PREFIX_BYTES: Final = _PREFIX.size
_KIND_AT: Final = 24
_ZEROS: Final = bytes(ALIGNMENT)

new_tuple: Final = tuple.__new__
"""Makes a named tuple without calling its constructor, which is a Python function."""

_pack_prefix = _PREFIX.pack
unpack_prefix = _PREFIX.unpack_from

Prefix = tuple[int, int, int, int, int, int]
"""Body length, call id, header length, number of buffers, kind, codec."""


class Kind:
    """The kind of a frame. Kinds from ``EXTENSION`` on belong to packages above the agent.

    Plain numbers instead of an ``Enum``, since they are compared for every frame.
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
    ARRIVED: Final = 12
    SEGMENTS: Final = 13
    IN_SEGMENT: Final = 14
    STREAMS: Final = 15
    STREAM: Final = 16
    ALIVE: Final = 17
    BULK: Final = 18
    BULK_CREDIT: Final = 19
    BULK_CLOSE: Final = 22
    CHALLENGE: Final = 20
    PROOF: Final = 21
    EXTENSION: Final = 32


CHUNK_KINDS: Final = frozenset((Kind.OPENING, Kind.CHUNK))
"""Kinds of the frames that a message in chunks consists of."""


class Frame(NamedTuple):
    """One received message. ``kind`` is a plain int, so that kinds of extensions need no registration here.
    ``codec`` says how the payload is encoded.
    """

    kind: int
    call_id: int
    header: dict[str, Any]
    buffers: list[Any]
    codec: int = 0


class LargeFrame(Frame):
    """A message that arrived in chunks, and its number among those."""

    number: int


def encode(
    kind: int, call_id: int, header: dict[str, Any], buffers: Sequence[Any], codec: int = 0
) -> tuple[list[Any], int]:
    """Lay out one frame. Returns the pieces to send, in order, and the sum of their lengths in bytes.

    Args:
        kind: what the frame is.
        call_id: the call that it belongs to, or 0.
        header: a map that msgpack can encode; an empty one takes no bytes.
        buffers: contiguous runs of bytes; they are referenced, not copied.
        codec: how the buffers are encoded.
    """
    packed_header: bytes = pack_header(header) if header else b""
    count = len(buffers)
    if len(packed_header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(packed_header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    if len(packed_header) > MAX_ENTRIES:  # otherwise it has fewer entries
        check_entries(memoryview(packed_header))
    if count > MAX_BUFFERS:
        raise ProtocolError(f"a frame of {count} buffers is over the limit of {MAX_BUFFERS}")
    if count <= 1:
        body = len(packed_header) + (len(buffers[0]) if count else 0)
        head = _pack_prefix(body, call_id, len(packed_header), count, kind, codec) + packed_header
        return ([head, buffers[0]] if count else [head]), PREFIX_BYTES + body
    lengths = [len(buffer) for buffer in buffers]
    table = pack(f"<{count - 1}Q", *lengths[:-1])
    offset = len(table) + len(packed_header) + lengths[0]
    pieces: list[Any] = [b"", buffers[0]]
    for buffer, length in zip(buffers[1:], lengths[1:], strict=True):
        padding = -offset % ALIGNMENT
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
    """Like ``encode``, for a frame with at most one buffer, in one piece: the form of most messages."""
    packed: bytes = pack_header(header) if header else b""
    if not buffers:
        return _pack_prefix(len(packed), call_id, len(packed), 0, kind, codec) + packed
    pickle: bytes = buffers[0]
    return _pack_prefix(len(packed) + len(pickle), call_id, len(packed), 1, kind, codec) + packed + pickle


def chunked(buffers: Sequence[Any], size: int, number: int) -> ChunkedMessage:
    """Make a message in chunks from the result of ``encode``; it must have nonempty buffers."""
    head: bytes = buffers[0]
    opening = _pack_prefix(len(head), number, 0, 0, Kind.OPENING, 0) + head
    return ChunkedMessage(opening, number, buffers[1:], size - len(head), kind=head[_KIND_AT])


def chunk_prefix(number: int, offset: int, length: int) -> bytes:
    """Return the prefix for the ``length`` bytes of message ``number`` from ``offset`` on."""
    return _CHUNK_PREFIX.pack(length, number, offset, Kind.CHUNK, 0)


def read_prefix(prefix: memoryview) -> tuple[int, int, int, int]:
    """Return kind, call id or number, length, and offset of a stream's frame, which is an opening
    or a chunk.
    """
    length, number, offset, kind, _ = _CHUNK_PREFIX.unpack(prefix)
    return kind, number, length, offset


def describe(head: bytes) -> tuple[int, int, dict[str, Any]]:
    """Return kind, call id and header of a message, given its first piece from ``encode``."""
    prefix = unpack_prefix(head)
    end = PREFIX_BYTES + _start_of_buffers(prefix)
    header = unpack_header(memoryview(head)[end - prefix[2] : end]) if prefix[2] else {}
    return prefix[4], prefix[1], header


def is_bulk(head: bytes, call_id: int) -> bool:
    """Whether the first piece of a message, from ``encode``, has kind ``BULK`` and this call id."""
    prefix = unpack_prefix(head)
    return bool(prefix[1] == call_id and prefix[4] == Kind.BULK)


def decode_one(data: bytearray) -> Frame:
    """Decode the frame that ``data`` consists of; it shares that memory. Raises ``ProtocolError``."""
    view = memoryview(data)
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"{len(data)} bytes are too few for a frame")
    prefix = unpack_prefix(view)
    if prefix[0] != len(data) - PREFIX_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes says that its body has {prefix[0]}")
    return build_frame(prefix, view[PREFIX_BYTES:])


def build_frame(prefix: Prefix, body: bytearray | memoryview) -> Frame:
    """Make the frame with this prefix, which shares the memory of its body. Raises ``ProtocolError``."""
    body_length, call_id, header_length, count, kind, codec = prefix
    view = memoryview(body)
    if count == 1 and header_length <= body_length and header_length <= MAX_HEADER_BYTES:
        header = unpack_header(view[:header_length]) if header_length else {}
        return new_tuple(Frame, (kind, call_id, header, [view[header_length:]], codec))
    check_layout(prefix)
    header, places = _lay_open(prefix, view)
    return new_tuple(Frame, (kind, call_id, header, [view[begin:end] for begin, end in places], codec))


def read_whole(
    data: bytearray, start: int, end: int, max_frame_bytes: int, frames: list[Frame], most: int = sys.maxsize
) -> int:
    """Append the frames that ``data`` contains from ``start`` to ``end`` to ``frames``, with copies of their
    bodies. Returns where the next one begins: one that is incomplete, over the limit, or part of a message in
    chunks, or that would be one more than ``most``. Raises ``ProtocolError``.
    """
    while end - start >= PREFIX_BYTES and len(frames) < most:
        prefix = unpack_prefix(data, start)
        length, call_id, header_length, count, kind, codec = prefix
        body = start + PREFIX_BYTES
        if body + length > end or length > max_frame_bytes or kind in CHUNK_KINDS:
            break
        start = body + length
        if count == 1 and not header_length:  # as most are
            frames.append(new_tuple(Frame, (kind, call_id, {}, [data[body:start]], codec)))
        else:
            frames.append(build_frame(prefix, data[body:start]))
    return start


def _start_of_buffers(prefix: Prefix) -> int:
    """Return the offset of the first buffer in a body, after table and header."""
    return 8 * max(0, prefix[3] - 1) + prefix[2]


def check_layout(prefix: Prefix) -> None:
    """Raise ``ProtocolError`` if a body of this length cannot hold the header and the table of buffers."""
    body_length, _, header_length, count, _, _ = prefix
    if header_length > MAX_HEADER_BYTES or count > MAX_BUFFERS:
        raise ProtocolError(
            f"a frame of {count} buffers and a header of {header_length} bytes is over the limits "
            f"of {MAX_BUFFERS} and {MAX_HEADER_BYTES}"
        )
    if _start_of_buffers(prefix) > body_length:
        raise ProtocolError(
            f"a frame of {body_length} bytes cannot hold {count} buffers "
            f"and a header of {header_length} bytes"
        )


def _lay_open(prefix: Prefix, body: memoryview) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return the header, and the start and end of each buffer in the body, for a prefix that has passed
    ``check_layout``. Only table and header of the body are needed.
    """
    body_length, _, header_length, count, _, _ = prefix
    begin = _start_of_buffers(prefix)
    header = unpack_header(body[begin - header_length : begin]) if header_length else {}
    places: list[tuple[int, int]] = []
    for length in unpack_from(f"<{count - 1}Q", body) if count > 1 else ():
        end = begin + length
        places.append((begin, end))
        begin = end + -end % ALIGNMENT
        if begin > body_length:
            bad = len(places) - (end > body_length)
            raise ProtocolError(f"buffer {bad} of {count} ends beyond its frame of {body_length} bytes")
    if count:
        places.append((begin, body_length))
    elif begin != body_length:
        raise ProtocolError(f"{body_length - begin} bytes of a frame belong to no buffer")
    return header, places


def open_message(
    arriving: Reassembly,
    number: int,
    opening: memoryview,
    max_frame_bytes: int,
    *,
    on_stream: bool = False,
) -> None:
    """Start a message that arrives in chunks, where ``opening`` is prefix, table and header. Raises
    ``ProtocolError`` if that is malformed, or over a limit.
    """
    if len(opening) < PREFIX_BYTES:
        raise ProtocolError(f"an opening of {len(opening)} bytes is too short")
    inner = unpack_prefix(opening)
    length, call_id, _, count, kind, codec = inner
    start, promised = _start_of_buffers(inner), arriving.promised - arriving.leeway
    if max_frame_bytes < WHOLE_BYTES:  # nothing must be kept for strangers
        raise ProtocolError(f"a message in chunks, where none over {max_frame_bytes} bytes is taken")
    if length > max_frame_bytes or length - start > max_frame_bytes - promised:
        raise ProtocolError(
            f"a message of {length} bytes, where {promised} are open, is over the limit of {max_frame_bytes}"
        )
    check_layout(inner)
    if not count or kind in CHUNK_KINDS or PREFIX_BYTES + start != len(opening):
        raise ProtocolError(f"a malformed opening of a message of kind {kind} with {count} buffers")
    header, places = _lay_open(inner, opening[PREFIX_BYTES:])
    begins = [*(begin for begin, _ in places), length]
    rooms = [
        Room(end - begin, following - begin)
        for (begin, end), following in zip(places, begins[1:], strict=True)
    ]
    target = arriving.find_target(kind, call_id, [room.length for room in rooms]) if not header else None
    if isinstance(target, MergingTarget) and not on_stream:
        target.take_back()  # threads of streams merge what has arrived, the one of the connection must not
    arriving.open(number, (kind, call_id, header, codec), rooms, start % ALIGNMENT, target)


def large_frame(number: int, whole: tuple[Any, list[memoryview]]) -> LargeFrame:
    """Make the frame of a message that ``Reassembly.filled`` has returned."""
    (kind, call_id, header, codec), buffers = whole
    frame = LargeFrame(kind, call_id, header, buffers, codec)
    frame.number = number
    return frame
