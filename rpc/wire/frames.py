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
message it belongs (u64). See ``chunking.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack, unpack_from
from typing import Any, Final, NamedTuple

import msgpack

from rpc.errors import ProtocolError
from rpc.wire.chunking import (
    MAX_BUFFERS,
    WHOLE_BYTES,
    ArrivingMessage,
    ChunkedMessage,
    Reassembly,
    Room,
    allocate,
)
from rpc.wire.header_check import MAX_ENTRIES, check_entries
from rpc.wire.targets import MergingTarget

__all__ = [
    "MAX_BUFFERS",
    "MAX_HEADER_BYTES",
    "PREAMBLE",
    "PREFIX_BYTES",
    "PROTOCOL_VERSION",
    "Decoder",
    "Frame",
    "Kind",
    "LargeFrame",
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
    "pack_header",
    "read_prefix",
    "unpack_header",
]

PROTOCOL_VERSION: Final = 5
MAGIC: Final = b"farcall"
PREAMBLE: Final = MAGIC + bytes([PROTOCOL_VERSION])

_TLS_HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a connection with TLS."""

MAX_HEADER_BYTES: Final = 64 << 20
ALIGNMENT: Final = 16

_SMALL_HEADER_BYTES: Final = 64 << 10
_FEW_ENTRIES: Final = 1024
"""Maximum number of entries of lists in a small header that is not checked, since it cannot take
much memory.
"""

_PREFIX: Final = Struct("<QQIIBB2x")
_CHUNK_PREFIX: Final = Struct("<QQQBB2x")
PREFIX_BYTES: Final = _PREFIX.size
_KIND_AT: Final = 24
_ZEROS: Final = bytes(ALIGNMENT)
_ANY_TEXT: Final = "surrogatepass"  # texts of users' exceptions need not be valid Unicode

_packers: Final[list[Any]] = []
"""Packers that are not in use: each has a buffer that takes longer to allocate than most headers take to
pack. A thread removes the one that it uses, so that a finalizer or another thread cannot get the same one.
"""

_RECEIVE_BUFFER_BYTES: Final = 256 << 10
_BETWEEN_CHUNKS_BYTES: Final = 4096
"""Maximum number of bytes received into temporary memory while a chunk may begin."""

_FEW: Final = 4
"""Maximum number of frames that arrive together and are not left to the loop."""

new_tuple: Final = tuple.__new__
"""Makes a named tuple without calling its constructor, which is a Python function."""

_pack_prefix = _PREFIX.pack
_unpack_prefix = _PREFIX.unpack_from

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


_ABOUT_CHUNKS: Final = frozenset((Kind.OPENING, Kind.CHUNK))


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
    prefix = _unpack_prefix(head)
    end = PREFIX_BYTES + _start_of_buffers(prefix)
    header = unpack_header(memoryview(head)[end - prefix[2] : end]) if prefix[2] else {}
    return prefix[4], prefix[1], header


def is_bulk(head: bytes, call_id: int) -> bool:
    """Whether the first piece of a message, from ``encode``, has kind ``BULK`` and this call id."""
    prefix = _unpack_prefix(head)
    return bool(prefix[1] == call_id and prefix[4] == Kind.BULK)


def decode_one(data: bytearray) -> Frame:
    """Decode the frame that ``data`` consists of; it shares that memory. Raises ``ProtocolError``."""
    view = memoryview(data)
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"{len(data)} bytes are too few for a frame")
    prefix = _unpack_prefix(view)
    if prefix[0] != len(data) - PREFIX_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes says that its body has {prefix[0]}")
    return _build(prefix, view[PREFIX_BYTES:])


def _build(prefix: Prefix, body: bytearray | memoryview) -> Frame:
    """Make the frame with this prefix, which shares the memory of its body. Raises ``ProtocolError``."""
    body_length, call_id, header_length, count, kind, codec = prefix
    if count == 1 and not header_length:  # as most are
        return new_tuple(Frame, (kind, call_id, {}, [body], codec))
    view = memoryview(body)
    if count == 1 and header_length <= body_length and header_length <= MAX_HEADER_BYTES:
        header = unpack_header(view[:header_length])
        return new_tuple(Frame, (kind, call_id, header, [view[header_length:]], codec))
    _check_layout(prefix)
    header, places = _lay_open(prefix, view)
    return new_tuple(Frame, (kind, call_id, header, [view[begin:end] for begin, end in places], codec))


def _start_of_buffers(prefix: Prefix) -> int:
    """Return the offset of the first buffer in a body, after table and header."""
    return 8 * max(0, prefix[3] - 1) + prefix[2]


def _check_layout(prefix: Prefix) -> None:
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
    ``_check_layout``. Only table and header of the body are needed.
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


def pack_header(header: dict[str, Any]) -> bytes:
    """Encode a header."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(unicode_errors=_ANY_TEXT)
    packed: bytes = packer.pack(header)
    _packers.append(packer)
    return packed


def _unpack_small(packed: memoryview) -> Any:
    try:
        return msgpack.unpackb(
            packed,
            strict_map_key=False,
            unicode_errors=_ANY_TEXT,
            max_array_len=_FEW_ENTRIES,
            max_map_len=_FEW_ENTRIES,
        )
    except ValueError as error:
        if "exceeds max_" not in str(error):
            raise
    check_entries(packed)
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors=_ANY_TEXT)


def unpack_header(packed: memoryview) -> dict[str, Any]:
    """Decode a frame's header. Raises ``ProtocolError`` if it is not a map in msgpack."""
    try:
        if len(packed) > _SMALL_HEADER_BYTES:
            check_entries(packed)
            header = msgpack.unpackb(packed, strict_map_key=False, unicode_errors=_ANY_TEXT)
        else:
            header = _unpack_small(packed)
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises a handful of unrelated types for malformed input
        raise ProtocolError(f"a frame's header is not msgpack: {type(error).__name__} {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"a frame's header is a {type(header).__name__}, not a map")
    return header


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
    inner = _unpack_prefix(opening)
    length, call_id, _, count, kind, codec = inner
    start, promised = _start_of_buffers(inner), arriving.promised - arriving.leeway
    if max_frame_bytes < WHOLE_BYTES:  # nothing must be kept for strangers
        raise ProtocolError(f"a message in chunks, where none over {max_frame_bytes} bytes is taken")
    if length > max_frame_bytes or length - start > max_frame_bytes - promised:
        raise ProtocolError(
            f"a message of {length} bytes, where {promised} are open, is over the limit of {max_frame_bytes}"
        )
    _check_layout(inner)
    if not count or kind in _ABOUT_CHUNKS or PREFIX_BYTES + start != len(opening):
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


class Decoder:
    """Turns the bytes of one connection into frames. For one thread at a time.

    ``buffer()`` returns where to receive the next bytes, ``received(n)`` the frames that are complete then. A
    frame that fits the receive buffer is copied out of it; for a larger one, or a chunk, memory is allocated
    after the length has been checked, and filled in place. Buffers of frames are writable and belong to the
    receiver. After a ``ProtocolError`` the decoder must not be used again.

    Args:
        max_frame_bytes: maximum size in bytes of a frame's body; may be changed at any time.

    Attributes:
        scratch: the receive buffer, for all bytes except the rest of a large frame.
        scratch_offset: offset of the next bytes in ``scratch``, or -1 in the middle of a large frame.
        scratch_end: where to stop receiving into it: after a few bytes if a chunk may begin.
        postponed: whether a frame over the limit followed those just returned, which may raise the limit.
            Call ``received(0)`` when they are processed.
        arriving: reassembles large messages; shared with bulk streams.
    """

    def __init__(self, max_frame_bytes: int, receive_bytes: int = _RECEIVE_BUFFER_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.postponed = False
        self.scratch = bytearray(receive_bytes)
        self.scratch_offset = 0
        self.scratch_end = len(self.scratch)
        self.arriving = Reassembly(allocate)
        self._view = memoryview(self.scratch)
        self._start = 0
        self._greeted = False
        self._large: Prefix | None = None  # prefix of the frame that is being filled, unless it is a chunk
        self._message: ArrivingMessage | None = None  # message of the chunk that is being filled
        self._number = self._chunk_bytes = self._at = 0
        self._body = self._view[:0]
        self._filled = 0

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes: never empty. Valid within ``writing`` of ``message``, if
        there is one.
        """
        if self.scratch_offset < 0:
            message = self._message
            if message is not None:
                return message.room(self._at, self._chunk_bytes - self._filled)
            return self._body[self._filled :]
        return self._view[self.scratch_offset : self.scratch_end]

    def buffers(self) -> list[memoryview]:
        """Like ``buffer``; after a chunk, also the memory for what follows it, for the same read."""
        buffer = self.buffer()
        if self._message is None or len(buffer) < self._chunk_bytes - self._filled:
            return [buffer]
        return [buffer, self._view[:_BETWEEN_CHUNKS_BYTES]]

    @property
    def message(self) -> ArrivingMessage | None:
        """The message in chunks whose memory the next bytes are received into, or None."""
        return self._message

    def received(self, count: int) -> list[Frame]:
        """Handle ``count`` bytes that were written to ``buffer()`` or ``buffers()``; returns the frames that
        are complete now, in order. Raises ``ProtocolError`` if they violate the protocol.
        """
        frames: list[Frame] = []
        if self.scratch_offset < 0:
            left = (len(self._body) if self._message is None else self._chunk_bytes) - self._filled
            self._filled += count
            self._at += count
            if count >= left:
                self._body_filled(frames)
            if count > left:
                self._read_frames(frames, count - left)
            return frames
        end = self.scratch_offset + count
        if self._greeted or self._read_preamble(end):
            self._read_frames(frames, end)
        else:
            self.scratch_offset = end
        return frames

    def grow(self) -> None:
        """Replace a smaller receive buffer by one of full size. Between calls of ``received``."""
        small, kept = self.scratch, max(0, self.scratch_offset)
        if len(small) >= _RECEIVE_BUFFER_BYTES:
            return
        self.scratch = bytearray(_RECEIVE_BUFFER_BYTES)
        self.scratch[:kept] = small[:kept]
        self._view = memoryview(self.scratch)
        if self.scratch_end == len(small):
            self.scratch_end = len(self.scratch)

    def clear(self) -> None:
        """Drop what has begun to arrive: neither the rest nor anything else will arrive."""
        self.arriving.clear()
        self._message = None
        self._body = self._view[:0]

    def is_between_frames(self) -> bool:
        """Whether a frame is next, and may be a whole one: no other has begun."""
        return not self.scratch_offset and self.scratch_end == len(self.scratch) and self._greeted

    def whole_frames(self, count: int) -> list[Frame] | None:
        """Return the frames that ``count`` bytes consist of that arrived between frames; the decoder's state
        does not change.

        None if these are anything but a few whole frames, each well-formed and complete in itself.
        """
        frames: list[Frame] = []
        start = 0
        try:
            while start + PREFIX_BYTES <= count and len(frames) < _FEW:
                frame, start = self._frame_at(start, count)
                if frame is None:
                    return None
                frames.append(frame)
        except ProtocolError:  # ``received`` will raise it again
            return None
        return frames if start == count and frames else None

    def _frame_at(self, start: int, end: int) -> tuple[Frame | None, int]:
        """Return the frame at ``start`` of the receive buffer, whose content ends at ``end``, and the frame's
        end.

        Returns None and ``start`` if it is incomplete, over the limit, or about a message in chunks.
        """
        prefix = _unpack_prefix(self.scratch, start)
        stop = start + PREFIX_BYTES + prefix[0]
        if stop > end or prefix[0] > self.max_frame_bytes or prefix[4] in _ABOUT_CHUNKS:
            return None, start
        return _build(prefix, self.scratch[start + PREFIX_BYTES : stop]), stop

    def _read_preamble(self, end: int) -> bool:
        got = bytes(self._view[: min(end, len(PREAMBLE))])
        if got.startswith(_TLS_HANDSHAKE):
            raise ProtocolError(
                "the peer does not speak farcall's protocol: it uses TLS, and this worker does not. Give the "
                "option tls= to all workers of a group, or to none"
            )
        if not MAGIC.startswith(got[: len(MAGIC)]):
            raise ProtocolError(f"the peer does not speak farcall's protocol (it began with {got!r})")
        if len(got) < len(PREAMBLE):
            return False
        if got[-1] != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks version {got[-1]} of farcall's protocol, this worker version "
                f"{PROTOCOL_VERSION}"
            )
        self._start = len(PREAMBLE)
        self._greeted = True
        return True

    def _read_frames(self, frames: list[Frame], end: int) -> None:
        start, self._start = self._start, 0
        self.postponed = False
        within = False
        missing = 0
        while end - start >= PREFIX_BYTES and not within:
            frame, start = self._frame_at(start, end)
            if frame is not None:
                frames.append(frame)
                continue
            prefix = _unpack_prefix(self.scratch, start)
            body, length = start + PREFIX_BYTES, prefix[0]
            if length > self.max_frame_bytes:
                if frames:
                    self.postponed = True
                    break
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.max_frame_bytes}")
            if prefix[4] == Kind.CHUNK:
                available = self._view[body : min(body + length, end)]
                start = body + len(available)
                within = not self._read_chunk(prefix, available, frames)
                continue
            _check_layout(prefix)
            if body + length <= end:  # an opening
                opening = self._view[body : body + length]
                if frames and length >= PREFIX_BYTES and _unpack_prefix(opening)[0] > self.max_frame_bytes:
                    self.postponed = True
                    break
                self._open(prefix[1], opening)
                start = body + length
            elif PREFIX_BYTES + length > len(self._view):
                self._body = allocate(length)
                self._filled = end - body
                self._body[: self._filled] = self._view[body:end]
                self._large = prefix
                start = end
                within = True
            else:
                missing = body + length - end
                break
        if start and start != end:
            # The rest is the beginning of a frame: move it to the front, where all of it will fit.
            self._view[: end - start] = self._view[start:end].tobytes()
        self.scratch_offset = -1 if within else end - start
        self._set_scratch_end(missing)

    def _body_filled(self, frames: list[Frame]) -> None:
        """Handle that the memory that ``buffer`` returned is full."""
        if self._large is None:
            self._chunk_complete(frames)
        elif self._large[4] == Kind.OPENING:
            self._open(self._large[1], self._body)
        else:
            frames.append(_build(self._large, self._body))
        self._large = None
        self._body = self._view[:0]
        self.scratch_offset = 0
        self._set_scratch_end(0)

    def _set_scratch_end(self, missing: int) -> None:
        self.scratch_end = len(self.scratch)
        if self.arriving:
            room = self.scratch_offset + max(missing, _BETWEEN_CHUNKS_BYTES)
            self.scratch_end = min(self.scratch_end, room)

    # ---- messages in chunks

    def _open(self, number: int, opening: memoryview) -> None:
        open_message(self.arriving, number, opening, self.max_frame_bytes)

    def _read_chunk(self, prefix: Prefix, available: memoryview, frames: list[Frame]) -> bool:
        """Start a chunk, of which some is available; returns whether that is all of it."""
        length, number = prefix[:2]
        offset = prefix[2] | prefix[3] << 32  # see ``chunk_prefix``
        message = self.arriving.begin(number, offset, length)
        message.fill(offset, available)
        self._number, self._chunk_bytes = number, length
        if len(available) == length:
            self._chunk_complete(frames)
            return True
        self._message, self._filled, self._at = message, len(available), offset + len(available)
        return False

    def _chunk_complete(self, frames: list[Frame]) -> None:
        self._message = None
        whole = self.arriving.filled(self._number, self._chunk_bytes)
        if whole is not None:
            frames.append(large_frame(self._number, whole))
