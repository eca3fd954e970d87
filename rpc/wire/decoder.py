"""The wire format's receiving side: what a socket receives, to frames; without I/O.

``Decoder`` is fed from a socket: ``buffer()`` says where the next bytes should be received to, and
``received(n)`` returns the frames that are complete then. A frame that fits the receive buffer is copied
out of it in one piece; for a larger one, or for a chunk, memory is allocated at once, after the length is
checked against the limit, and filled in place. Whatever violates the format raises ``ProtocolError``, after
which the decoder must not be used again. Buffers are writable and belong to the frame's receiver.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from typing import Any, Final

import numpy as np

from rpc.errors import ProtocolError
from rpc.wire.chunking import Reassembly, Room
from rpc.wire.frames import (
    ALIGNMENT,
    MAGIC,
    MAX_HEADER_BYTES,
    PREAMBLE,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Frame,
    Kind,
    Prefix,
    buffer_ends,
    build,
    check_layout,
    chunk_offset,
    padding_after,
    table_bytes,
    unpack_header,
    unpack_prefix,
)

__all__ = ["Decoder", "allocate", "read_opening"]

_RECEIVE_BUFFER_BYTES: Final = 256 << 10
_PAGE_BACKED_BYTES: Final = 4 << 20
_BETWEEN_CHUNKS_BYTES: Final = 4096
"""How much is received to where it does not stay while a chunk may begin."""

_FEW: Final = 4
"""More frames that come together are left to the loop."""

_ABOUT_CHUNKS: Final = frozenset((Kind.OPENING, Kind.CHUNK))

_new_frame = tuple.__new__
"""Makes a named tuple without the Python function that it has for a constructor."""


class Decoder:
    """Turns the bytes of one connection into frames. For one thread at a time.

    Args:
        max_frame_bytes: frames with a longer body are refused. It may be changed while the decoder is in
            use: peers that have not yet said who they are get a small limit.

    Attributes:
        scratch: the receive buffer, where all bytes go that are not the rest of a large frame.
        scratch_offset: where in ``scratch`` the next bytes go, or -1 in the middle of a large frame.
        scratch_end: how far to receive into it: no more than a little where a chunk may begin.
        postponed: a frame over the limit came right behind those just returned, which may be what raises
            the limit. Call ``received(0)`` when they are dealt with.
        arriving: puts large messages together; several connections to one peer share it.
        lane: the number of this connection among those.
    """

    __slots__ = (
        "_body",
        "_chunk",
        "_filled",
        "_greeted",
        "_large",
        "_parts",
        "_start",
        "_view",
        "arriving",
        "lane",
        "max_frame_bytes",
        "postponed",
        "scratch",
        "scratch_end",
        "scratch_offset",
    )

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.postponed = False
        self.scratch = bytearray(_RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self.scratch)
        self._start = 0
        self.scratch_offset = 0
        self.scratch_end = len(self.scratch)
        self._greeted = False
        self.arriving = Reassembly(allocate)
        self.lane = 0
        self._large: Prefix | None = None
        self._chunk = (0, 0)
        self._parts: deque[memoryview] = deque()
        self._body = self._view[:0]
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go: never empty."""
        if self.scratch_offset < 0:
            return self._body[self._filled :]
        return self._view[self.scratch_offset : self.scratch_end]

    def received(self, count: int) -> list[Frame]:
        """Take note that ``count`` bytes were written to the start of ``buffer()``.

        Returns:
            The frames that are complete now, in order.

        Raises:
            ProtocolError: the bytes are not what the protocol allows.
        """
        frames: list[Frame] = []
        if self.scratch_offset < 0:
            self._filled += count
            if self._filled == len(self._body):
                self._body_filled(frames)
            return frames
        end = self.scratch_offset + count
        if not self._greeted and not self._read_preamble(end):
            self.scratch_offset = end
            return frames
        self._read_frames(frames, end)
        return frames

    def clear(self) -> None:
        """Let go of what has begun to arrive: the rest will not come, and nothing else will."""
        if not self.lane:  # else others go on with what is open
            self.arriving.clear()
        self._parts.clear()
        self._body = self._view[:0]

    def is_between_frames(self) -> bool:
        """Whether a frame is next, and may come as a whole: no other has been begun."""
        return not self.scratch_offset and self.scratch_end == len(self.scratch) and self._greeted

    def whole_frames(self, count: int) -> list[Frame] | None:
        """The frames that ``count`` bytes are which have come between frames; the decoder's state stays.

        None if these are anything but a few whole frames, each well-formed and complete in itself.
        """
        frames: list[Frame] = []
        start = 0
        try:
            while start + PREFIX_BYTES <= count and len(frames) < _FEW:
                frame = self._frame_at(start, count)
                if frame is None:
                    return None
                frames.append(frame[0])
                start = frame[1]
        except ProtocolError:  # ``received`` finds it too, and says so
            return None
        return frames if start == count and frames else None

    def _frame_at(self, start: int, end: int) -> tuple[Frame, int] | None:
        """The frame that begins at ``start`` of the receive buffer, and its end; what has come ends at
        ``end``.

        None if it is not there as a whole, or is over the limit, or about a message in chunks.
        """
        prefix = unpack_prefix(self.scratch, start)
        length, call_id, header_length, buffers, kind, codec = prefix
        body = start + PREFIX_BYTES
        stop = body + length
        if stop > end or length > self.max_frame_bytes or kind in _ABOUT_CHUNKS:
            return None
        if buffers == 1:  # the usual case, kept short
            if not header_length:
                return _new_frame(Frame, (kind, call_id, {}, [self.scratch[body:stop]], codec)), stop
            first = body + header_length
            if first <= stop and header_length <= MAX_HEADER_BYTES:
                header = unpack_header(self._view[body:first])
                return _new_frame(Frame, (kind, call_id, header, [self.scratch[first:stop]], codec)), stop
        check_layout(prefix)
        return build(prefix, memoryview(self.scratch[body:stop])), stop

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
        start, self._start = self._start, 0
        self.postponed = False
        within = False
        missing = 0
        while end - start >= PREFIX_BYTES and not within:
            frame = self._frame_at(start, end)
            if frame is not None:
                frames.append(frame[0])
                start = frame[1]
                continue
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
                if frames and self._is_over_limit(opening):
                    self.postponed = True
                    break
                self._open(prefix, opening)
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
            # What is left is the beginning of a frame: move it to the front, where all of it will fit.
            self._view[: end - start] = self._view[start:end].tobytes()
        self.scratch_offset = -1 if within else end - start
        self._set_scratch_end(missing)

    def _is_over_limit(self, opening: memoryview) -> bool:
        return len(opening) >= PREFIX_BYTES and unpack_prefix(opening)[0] > self.max_frame_bytes

    def _body_filled(self, frames: list[Frame]) -> None:
        """The memory that ``buffer`` pointed to is full."""
        if self._parts:  # the rest of a chunk
            self._body, self._filled = self._parts.popleft(), 0
            return
        if self._large is None:
            self._chunk_complete(frames)
        elif self._large[4] == Kind.OPENING:
            self._open(self._large, self._body)
        else:
            frames.append(build(self._large, self._body))
        self._large = None
        self._body = self._view[:0]
        self.scratch_offset = 0
        self._set_scratch_end(0)

    def _set_scratch_end(self, missing: int) -> None:
        size = len(self.scratch)
        if self.arriving:
            size = min(size, self.scratch_offset + max(missing, _BETWEEN_CHUNKS_BYTES))
        self.scratch_end = size

    # ---- messages in chunks

    def _open(self, prefix: Prefix, opening: memoryview) -> None:
        number, arriving = prefix[1], self.arriving
        if arriving.is_open(number):
            arriving.open_again(number, self.lane)
        else:
            what, rooms, lead = read_opening(
                opening, self.max_frame_bytes, arriving.promised - arriving.leeway
            )
            arriving.open(number, what, rooms, lead, self.lane)

    def _read_chunk(self, prefix: Prefix, available: memoryview, frames: list[Frame]) -> bool:
        """A chunk begins, of which some is available; returns whether that is all of it."""
        length, number = prefix[:2]
        parts = self.arriving.begin(number, chunk_offset(prefix), length)
        self._chunk = number, length
        while available:
            part = parts[0]
            count = min(len(part), len(available))
            part[:count] = available[:count]
            available = available[count:]
            if count == len(part):
                parts.popleft()
            else:
                parts[0] = part[count:]
        if not parts:
            self._chunk_complete(frames)
            return True
        self._body, self._filled, self._parts = parts.popleft(), 0, parts
        return False

    def _chunk_complete(self, frames: list[Frame]) -> None:
        whole = self.arriving.filled(*self._chunk)
        if whole is not None:
            (kind, call_id, header, codec), buffers = whole
            frames.append(Frame(kind, call_id, header, buffers, codec))


def read_opening(
    opening: memoryview, max_bytes: int, promised: int
) -> tuple[tuple[int, int, dict[str, Any], int], list[Room], int]:
    """Take in the opening of a message whose buffers come in chunks.

    Args:
        opening: its prefix, table and header.
        max_bytes: how long it may be, together with what is open.
        promised: how much of messages that are open is still to come, in bytes.

    Returns:
        Kind, call id, header and codec; its buffers; how far from an alignment boundary the first one starts.

    Raises:
        ProtocolError: it is malformed, or over the limit.
    """
    if len(opening) < PREFIX_BYTES:
        raise ProtocolError(f"an opening of {len(opening)} bytes is too short")
    prefix = unpack_prefix(opening)
    body_length, call_id, header_length, count, kind, codec = prefix
    table_length = table_bytes(count)
    start = table_length + header_length
    if body_length > max_bytes or body_length - start > max_bytes - promised:
        raise ProtocolError(
            f"a message of {body_length} bytes, where {promised} are open, is over the limit of {max_bytes}"
        )
    check_layout(prefix)
    if not count or kind in _ABOUT_CHUNKS or PREFIX_BYTES + start != len(opening):
        raise ProtocolError(f"a malformed opening of a message of kind {kind} with {count} buffers")
    body = opening[PREFIX_BYTES:]
    ends = buffer_ends(body, body_length, start, count)
    rooms: list[Room] = []
    offset = start
    for index, end in enumerate(ends):
        following = end + padding_after(end) if index < count - 1 else end
        rooms.append(Room(end - offset, following - offset))
        offset = following
    header = unpack_header(body[table_length:]) if header_length else {}
    return (kind, call_id, header, codec), rooms, start % ALIGNMENT


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
        raise ProtocolError(f"there is no memory for a frame of {length} bytes ({error})") from error
