"""The wire format's receiving side: what a socket receives, to frames; without I/O.

``Decoder`` is fed from a socket: ``buffer()`` says where the next bytes should be received to, and
``received(n)`` returns the frames that are complete then. A frame that fits the receive buffer is copied
out of it in one piece; for a larger one, or for a chunk, memory is allocated at once, after the length is
checked against the limit, and filled in place. Whatever violates the format raises ``ProtocolError``, after
which the decoder must not be used again. Segments are writable and belong to the frame's receiver.
"""

from __future__ import annotations

import contextlib
import mmap
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
    build,
    check_layout,
    padding_after,
    segment_ends,
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
"""More frames that come together are taken in one by one, at less cost for each."""

_ABOUT_CHUNKS: Final = frozenset((Kind.OPENING, Kind.CHUNK, Kind.CANCELLED))

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
    """

    __slots__ = (
        "_arriving",
        "_body",
        "_filled",
        "_greeted",
        "_large",
        "_start",
        "_view",
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
        self._arriving = Reassembly(allocate)
        self._large: Prefix | None = None
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
        end = self.scratch_offset + count
        if self.scratch_offset == 0 and self._greeted:
            whole = self.whole_frames(count)
            if whole is not None:
                return whole
        frames: list[Frame] = []
        if self.scratch_offset < 0:
            self._filled += count
            if self._filled == len(self._body):
                self._body_filled(frames)
            return frames
        if not self._greeted and not self._read_preamble(end):
            self.scratch_offset = end
            return frames
        self._read_frames(frames, end)
        return frames

    def clear(self) -> None:
        """Let go of what has begun to arrive: the rest will not come, and nothing else will."""
        self._arriving.clear()
        self._body = self._view[:0]

    def is_between_frames(self) -> bool:
        """Whether a frame is next, and may come as a whole: no other has been begun."""
        return not self.scratch_offset and self.scratch_end == len(self.scratch) and self._greeted

    def whole_frames(self, count: int) -> list[Frame] | None:
        """Without taking anything in: the frames that ``count`` bytes are that have come between frames.

        None if these are anything but a few whole frames, each well-formed and complete in itself.
        """
        if count >= PREFIX_BYTES:
            # The usual cases, kept short: one frame, of one segment or none.
            length, call_id, header_length, segments, kind = unpack_prefix(self.scratch)
            if PREFIX_BYTES + length == count and segments <= 1 and length <= self.max_frame_bytes:
                if not segments:
                    if length or header_length or kind in _ABOUT_CHUNKS:
                        return self._few_frames(count)
                    return [_new_frame(Frame, (kind, call_id, {}, []))]
                if not header_length:
                    return [_new_frame(Frame, (kind, call_id, {}, [self.scratch[PREFIX_BYTES:count]]))]
                start = PREFIX_BYTES + header_length
                if start <= count and header_length <= MAX_HEADER_BYTES and kind not in _ABOUT_CHUNKS:
                    try:
                        header = unpack_header(self._view[PREFIX_BYTES:start])
                    except ProtocolError:  # ``received`` finds it too, and says so
                        return None
                    return [_new_frame(Frame, (kind, call_id, header, [self.scratch[start:count]]))]
        return self._few_frames(count)

    def _few_frames(self, count: int) -> list[Frame] | None:
        frames: list[Frame] = []
        start = 0
        try:
            while start + PREFIX_BYTES <= count and len(frames) < _FEW:
                prefix = unpack_prefix(self.scratch, start)
                body, start = start + PREFIX_BYTES, start + PREFIX_BYTES + prefix[0]
                if start > count or prefix[0] > self.max_frame_bytes or prefix[4] in _ABOUT_CHUNKS:
                    return None
                check_layout(prefix)
                frames.append(build(prefix, memoryview(self.scratch[body:start])))
        except ProtocolError:  # ``received`` finds it too, and says so
            return None
        return frames if start == count and frames else None

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

    def _body_filled(self, frames: list[Frame]) -> None:
        """The memory that ``buffer`` pointed to is full."""
        if self._large is None:
            self._chunk_filled(self._filled, frames)
            self._body, self._filled = self._arriving.target(), 0
            if self._body:
                return
        else:
            self._complete(self._large, self._body, frames)
            self._large = None
            self._body = self._view[:0]
        self.scratch_offset = 0
        self._set_scratch_end(0)

    def _set_scratch_end(self, missing: int) -> None:
        size = len(self.scratch)
        if self._arriving:
            size = min(size, self.scratch_offset + max(missing, _BETWEEN_CHUNKS_BYTES))
        self.scratch_end = size

    def _complete(self, prefix: Prefix, body: memoryview, frames: list[Frame]) -> None:
        """A frame is there: take it in if it is about chunks, else add it to ``frames``."""
        _, number, _, _, kind = prefix
        if kind == Kind.OPENING:
            opened = read_opening(body, self.max_frame_bytes, self._arriving.promised)
            self._arriving.open(number, *opened)
        elif kind == Kind.CANCELLED:
            self._arriving.cancel(number)
        else:
            frames.append(build(prefix, body))

    def _chunk_filled(self, count: int, frames: list[Frame]) -> None:
        whole = self._arriving.filled(count)
        if whole is not None:
            (kind, call_id, header), segments = whole
            frames.append(Frame(kind, call_id, header, segments))

    def _read_chunk(self, prefix: Prefix, available: memoryview, frames: list[Frame]) -> bool:
        """A chunk begins, of which some is available; returns whether that is all of it."""
        length, number, header_length, count, _ = prefix
        if header_length or count:
            raise ProtocolError(f"a chunk of message {number} claims to have a header or segments")
        self._arriving.begin(number, length)
        while True:
            target = self._arriving.target()
            count = min(len(target), len(available))
            if not count:
                break
            target[:count] = available[:count]
            available = available[count:]
            self._chunk_filled(count, frames)
        self._body, self._filled = target, 0
        return not target

    def _read_frames(self, frames: list[Frame], end: int) -> None:
        scratch, view, start = self.scratch, self._view, self._start
        limit = self.max_frame_bytes
        self._start = 0
        self.postponed = False
        missing = 0
        within = False
        while end - start >= PREFIX_BYTES:
            prefix = unpack_prefix(scratch, start)
            body_length, call_id, header_length, count, kind = prefix
            body_start = start + PREFIX_BYTES
            body_end = body_start + body_length
            if count == 1 and not header_length and body_end <= end and body_length <= limit:
                # Most frames are such; as they may come many at a time, nothing more is made of each.
                frames.append(_new_frame(Frame, (kind, call_id, {}, [scratch[body_start:body_end]])))
                start = body_end
                continue
            if body_length > limit:
                if frames:
                    self.postponed = True
                    break
                raise ProtocolError(f"a frame of {body_length} bytes is over the limit of {limit}")
            if header_length or count > 1:
                check_layout(prefix)
            if kind == Kind.CHUNK:
                available = view[body_start : min(body_end, end)]
                start = body_start + len(available)
                within = not self._read_chunk(prefix, available, frames)
                if within:
                    break
            elif body_end <= end:
                if kind == Kind.OPENING and frames and self._is_over_limit(view[body_start:body_end]):
                    self.postponed = True
                    break
                self._complete(prefix, memoryview(scratch[body_start:body_end]), frames)
                start = body_end
            elif PREFIX_BYTES + body_length > len(view):
                self._body = allocate(body_length)
                self._filled = end - body_start
                self._body[: self._filled] = view[body_start:end]
                self._large = prefix
                start = end
                within = True
                break
            else:
                missing = body_end - end
                break
        if start and start != end:
            # What is left is the beginning of a frame: move it to the front, where all of it will fit.
            view[: end - start] = view[start:end].tobytes()
        self.scratch_offset = -1 if within else end - start
        self._set_scratch_end(missing)

    def _is_over_limit(self, opening: memoryview) -> bool:
        return len(opening) >= PREFIX_BYTES and unpack_prefix(opening)[0] > self.max_frame_bytes


def read_opening(
    opening: memoryview, max_bytes: int, promised: int
) -> tuple[tuple[int, int, dict[str, Any]], list[Room], int]:
    """Take in the opening of a message whose segments come in chunks.

    Args:
        opening: its prefix, table and header.
        max_bytes: how long it may be, together with what is open.
        promised: how much of messages that are open is still to come, in bytes.

    Returns:
        Kind, call id and header; its segments; how far from an alignment boundary the first one starts.

    Raises:
        ProtocolError: it is malformed, or over the limit.
    """
    if len(opening) < PREFIX_BYTES:
        raise ProtocolError(f"an opening of {len(opening)} bytes is too short")
    prefix = unpack_prefix(opening)
    body_length, call_id, header_length, count, kind = prefix
    table_length = table_bytes(count)
    start = table_length + header_length
    if body_length > max_bytes or body_length - start > max_bytes - promised:
        raise ProtocolError(
            f"a message of {body_length} bytes, where {promised} are open, is over the limit of {max_bytes}"
        )
    check_layout(prefix)
    if not count or kind in _ABOUT_CHUNKS or PREFIX_BYTES + start != len(opening):
        raise ProtocolError(f"a malformed opening of a message of kind {kind} with {count} segments")
    body = opening[PREFIX_BYTES:]
    ends = segment_ends(body, body_length, start, count)
    rooms: list[Room] = []
    offset = start
    for index, end in enumerate(ends):
        following = end + padding_after(end) if index < count - 1 else end
        rooms.append(Room(end - offset, following - offset))
        offset = following
    header = unpack_header(body[table_length:]) if header_length else {}
    return (kind, call_id, header), rooms, start % ALIGNMENT


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
