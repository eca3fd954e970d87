"""The wire format: bytes to frames and back, without I/O.

A connection opens with an eight-byte *preamble* (magic and protocol version). Then frames follow each
other. All integers are little-endian::

    prefix    28 bytes   body length u64, call id u64, header length u32, segment count u32, kind u8, 3 x 0
    table                length u64 of every segment but the last, whose length is what remains
    header               one msgpack map; absent (length 0) when there is nothing to say
    segment 0            the pickle, in messages that have one
    segment 1, 2, ...    tensor bytes, each starting at a multiple of 16 within the body

``Decoder`` is fed from a socket: ``buffer()`` says where the next bytes should be received to, and
``received(n)`` returns the frames that are complete then. A frame that fits the receive buffer is copied
out of it in one piece; for a larger one its body is allocated at once, after the length is checked
against the limit, and filled in place. Whatever violates the format raises ``ProtocolError``, after which
the decoder must not be used again. Segments are writable and belong to the frame's receiver.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import msgpack

from rpc.errors import ProtocolError

__all__ = [
    "MAX_HEADER_BYTES",
    "MAX_SEGMENTS",
    "PREAMBLE",
    "PROTOCOL_VERSION",
    "Decoder",
    "Frame",
    "Kind",
    "decode_one",
    "encode",
    "encode_small",
]

PROTOCOL_VERSION: Final = 1
MAGIC: Final = b"farcall"
PREAMBLE: Final = MAGIC + bytes([PROTOCOL_VERSION])

MAX_HEADER_BYTES: Final = 64 << 20
MAX_SEGMENTS: Final = 1 << 20
ALIGNMENT: Final = 16

_PREFIX: Final = Struct("<QQIIB3x")
PREFIX_BYTES: Final = _PREFIX.size
_RECEIVE_BUFFER_BYTES: Final = 256 << 10
_PAGE_BACKED_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(ALIGNMENT)
_ANY_TEXT: Final = "surrogatepass"  # texts of users' exceptions need not be valid Unicode

_pack_prefix = _PREFIX.pack
_unpack_prefix = _PREFIX.unpack_from
_new_frame = tuple.__new__
"""Makes a named tuple without the Python function that it has for a constructor."""


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
    EXTENSION: Final = 32


class Frame(NamedTuple):
    """One message as it came off the wire.

    ``kind`` is a plain int, so that kinds of extensions need no registration here.
    """

    kind: int
    call_id: int
    header: dict[str, Any]
    segments: list[memoryview]


def _pad(offset: int) -> int:
    return -offset % ALIGNMENT


def encode(kind: int, call_id: int, header: dict[str, Any], segments: Sequence[Any]) -> tuple[list[Any], int]:
    """Lay out one frame.

    Args:
        kind: what the frame is.
        call_id: the call that it belongs to, or 0.
        header: a map that msgpack can encode; an empty one takes no bytes.
        segments: contiguous buffers of bytes; they are referenced, not copied.

    Returns:
        The buffers to send, in order, and the sum of their lengths in bytes.
    """
    packed_header: bytes = msgpack.packb(header, unicode_errors=_ANY_TEXT) if header else b""
    count = len(segments)
    if len(packed_header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(packed_header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    if count > MAX_SEGMENTS:
        raise ProtocolError(f"a frame of {count} segments is over the limit of {MAX_SEGMENTS}")
    if count <= 1:
        body = len(packed_header) + (len(segments[0]) if count else 0)
        head = _pack_prefix(body, call_id, len(packed_header), count, kind) + packed_header
        return ([head, segments[0]] if count else [head]), PREFIX_BYTES + body
    lengths = [len(segment) for segment in segments]
    table = Struct(f"<{count - 1}Q").pack(*lengths[:-1])
    offset = len(table) + len(packed_header) + lengths[0]
    buffers: list[Any] = [b"", segments[0]]
    for segment, length in zip(segments[1:], lengths[1:], strict=True):
        padding = _pad(offset)
        if padding:
            buffers.append(_ZEROS[:padding])
        if length:
            buffers.append(segment)
        offset += padding + length
    buffers[0] = _pack_prefix(offset, call_id, len(packed_header), count, kind) + table + packed_header
    return buffers, PREFIX_BYTES + offset


def encode_small(kind: int, call_id: int, header: dict[str, Any], segments: Sequence[Any]) -> bytes:
    """A frame with at most one segment, in one piece: the shape of most messages.

    Arguments are as for ``encode``.
    """
    packed: bytes = msgpack.packb(header, unicode_errors=_ANY_TEXT) if header else b""
    if not segments:
        return _pack_prefix(len(packed), call_id, len(packed), 0, kind) + packed
    pickle: bytes = segments[0]
    return _pack_prefix(len(packed) + len(pickle), call_id, len(packed), 1, kind) + packed + pickle


def decode_one(data: bytearray) -> Frame:
    """The frame that ``data`` consists of, over that memory. Raises ``ProtocolError`` if it is not one."""
    view = memoryview(data)
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"{len(data)} bytes are too few for a frame")
    prefix = _unpack_prefix(view)
    if prefix[0] != len(data) - PREFIX_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes says that its body has {prefix[0]}")
    _check_layout(prefix)
    return _build(prefix, view[PREFIX_BYTES:])


class Decoder:
    """Turns the bytes of one connection into frames. For one thread at a time.

    Args:
        max_frame_bytes: frames with a longer body are refused. It may be changed while the decoder is in
            use: peers that have not yet said who they are get a small limit.

    Attributes:
        scratch: the receive buffer, where all bytes go that are not the rest of a large frame.
        scratch_offset: where in ``scratch`` the next bytes go, or -1 in the middle of a large frame.
        postponed: a frame over the limit came right behind those just returned, which may be what raises
            the limit. Call ``received(0)`` when they are dealt with.
    """

    __slots__ = (
        "_body",
        "_filled",
        "_greeted",
        "_large",
        "_start",
        "_view",
        "max_frame_bytes",
        "postponed",
        "scratch",
        "scratch_offset",
    )

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.postponed = False
        self.scratch = bytearray(_RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self.scratch)
        self._start = 0
        self.scratch_offset = 0
        self._greeted = False
        self._large: tuple[int, int, int, int, int] | None = None
        self._body = self._view[:0]
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go: never empty."""
        if self.scratch_offset < 0:
            return self._body[self._filled :]
        return self._view[self.scratch_offset :]

    def received(self, count: int) -> list[Frame]:
        """Take note that ``count`` bytes were written to the start of ``buffer()``.

        Returns:
            The frames that are complete now, in order.

        Raises:
            ProtocolError: the bytes are not what the protocol allows.
        """
        end = self.scratch_offset + count
        if self.scratch_offset == 0 and self._greeted and count >= PREFIX_BYTES:
            # The usual case, kept short: one small frame has arrived, whole.
            body_length, call_id, header_length, segments, kind = _unpack_prefix(self.scratch)
            if (
                segments == 1
                and not header_length
                and PREFIX_BYTES + body_length == count
                and body_length <= self.max_frame_bytes
            ):
                segment = memoryview(self.scratch[PREFIX_BYTES:count])
                return [_new_frame(Frame, (kind, call_id, {}, [segment]))]
        frames: list[Frame] = []
        if self._large is not None:
            self._filled += count
            if self._filled == len(self._body):
                frames.append(_build(self._large, self._body))
                self._large = None
                self._body = self._view[:0]
                self.scratch_offset = 0
            return frames
        if not self._greeted and not self._read_preamble(end):
            self.scratch_offset = end
            return frames
        self._read_frames(frames, end)
        return frames

    def _read_preamble(self, end: int) -> bool:
        got = bytes(self._view[: min(end, len(PREAMBLE))])
        if not MAGIC.startswith(got[: len(MAGIC)]):
            raise ProtocolError(f"the peer does not speak farcall's protocol (it began with {got!r})")
        if len(got) < len(PREAMBLE):
            return False
        if got[-1] != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks version {got[-1]} of farcall's protocol, "
                f"this worker version {PROTOCOL_VERSION}"
            )
        self._start = len(PREAMBLE)
        self._greeted = True
        return True

    def _read_frames(self, frames: list[Frame], end: int) -> None:
        view, start = self._view, self._start
        self._start = 0
        self.postponed = False
        while end - start >= PREFIX_BYTES:
            prefix = _unpack_prefix(view, start)
            body_length, _, header_length, count, _ = prefix
            if body_length > self.max_frame_bytes:
                if frames:
                    self.postponed = True
                    break
                raise ProtocolError(
                    f"a frame of {body_length} bytes is over the limit of {self.max_frame_bytes}"
                )
            if header_length or count > 1:
                _check_layout(prefix)
            body_start = start + PREFIX_BYTES
            body_end = body_start + body_length
            if body_end <= end:
                frames.append(_build(prefix, memoryview(bytearray(view[body_start:body_end]))))
                start = body_end
            elif PREFIX_BYTES + body_length > len(view):
                self._body = _allocate(body_length)
                self._filled = end - body_start
                self._body[: self._filled] = view[body_start:end]
                self._large = prefix
                start = end
                break
            else:
                break
        if start and start != end:
            # What is left is the beginning of a frame: move it to the front, where all of it will fit.
            view[: end - start] = view[start:end].tobytes()
        self.scratch_offset = end - start if self._large is None else -1


def _check_layout(prefix: tuple[int, int, int, int, int]) -> None:
    """Raise ``ProtocolError`` if a body of this length cannot hold the header and the table of segments."""
    body_length, _, header_length, count, _ = prefix
    if header_length > MAX_HEADER_BYTES or count > MAX_SEGMENTS:
        raise ProtocolError(
            f"a frame of {count} segments and a header of {header_length} bytes is over the limits "
            f"of {MAX_SEGMENTS} and {MAX_HEADER_BYTES}"
        )
    table_length = 8 * (count - 1) if count > 1 else 0
    if table_length + header_length > body_length:
        raise ProtocolError(
            f"a frame of {body_length} bytes cannot hold {count} segments "
            f"and a header of {header_length} bytes"
        )


def _allocate(length: int) -> memoryview:
    """Writable memory; large blocks come as fresh pages, which nobody needs to clear first.

    They are private to this process: in a forked child, tensors over them are its own.
    """
    try:
        if length >= _PAGE_BACKED_BYTES:
            return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return memoryview(bytearray(length))
    except (MemoryError, OSError, OverflowError) as error:
        raise ProtocolError(f"there is no memory for a frame of {length} bytes ({error})") from error


def _build(prefix: tuple[int, int, int, int, int], body: memoryview) -> Frame:
    _, call_id, header_length, count, kind = prefix
    if count == 1 and not header_length:
        return Frame(kind, call_id, {}, [body])
    lengths: list[int] = []
    offset = 0
    if count > 1:
        offset = 8 * (count - 1)
        lengths = list(Struct(f"<{count - 1}Q").unpack_from(body))
    header = _unpack_header(body[offset : offset + header_length]) if header_length else {}
    offset += header_length
    segments: list[memoryview] = []
    for index in range(count):
        if index:
            offset += _pad(offset)
        end = offset + lengths[index] if index < count - 1 else len(body)
        if end > len(body) or offset > len(body):
            raise ProtocolError(f"segment {index} of {count} ends beyond its frame of {len(body)} bytes")
        segments.append(body[offset:end])
        offset = end
    if offset != len(body):
        raise ProtocolError(f"{len(body) - offset} bytes of a frame belong to no segment")
    return Frame(kind, call_id, header, segments)


def _unpack_header(packed: memoryview) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(packed, strict_map_key=False, unicode_errors=_ANY_TEXT)
    except Exception as error:  # msgpack raises a handful of unrelated types for malformed input
        raise ProtocolError(f"a frame's header is not msgpack: {type(error).__name__} {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"a frame's header is a {type(header).__name__}, not a map")
    return header
