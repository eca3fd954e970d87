"""From the bytes of a connection to frames, without I/O. See ``frames``."""

from __future__ import annotations

from typing import Final

from rpc.errors import ProtocolError
from rpc.wire.frames import (
    MAGIC,
    PREAMBLE,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Frame,
    Kind,
    Prefix,
    build_frame,
    check_layout,
    large_frame,
    open_message,
    read_whole,
    unpack_prefix,
)
from rpc.wire.reassembly import ArrivingMessage, Reassembly, allocate

__all__ = ["Decoder"]

_TLS_HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a connection with TLS."""

_RECEIVE_BUFFER_BYTES: Final = 256 << 10
_BETWEEN_CHUNKS_BYTES: Final = 4096
"""Maximum number of bytes received into temporary memory while a chunk may begin."""


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
        while not within:
            start = read_whole(self.scratch, start, end, self.max_frame_bytes, frames)
            if end - start < PREFIX_BYTES:
                break
            prefix = unpack_prefix(self.scratch, start)
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
            check_layout(prefix)
            if body + length <= end:  # an opening
                opening = self._view[body : body + length]
                if frames and length >= PREFIX_BYTES and unpack_prefix(opening)[0] > self.max_frame_bytes:
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
            frames.append(build_frame(self._large, self._body))
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
