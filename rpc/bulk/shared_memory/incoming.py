"""The receiving end: segments of one peer, mapped here, and the memory of received tensors in them.

A received tensor *is* the segment's memory, and belongs to the receiver: it is writable, and nothing else
changes it, until the last tensor, view or array over it is gone. Then the finalizer of that memory notes that
its use is over.

**Forks.** A forked child shares what its parent has mapped: it would see what the parent and later messages
write there. So right before a fork, all these mappings are replaced by private ones, in place, and the
segments are retired: they are never returned, and what is written after the fork is visible to its writer
only, as with any other memory.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import numpy as np

from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory.memory import REFUSED, RETIRED, SLOTS, Ledger, Mapping, SegmentRefused, check
from rpc.bulk.shared_memory.packing import places
from rpc.errors import ProtocolError
from rpc.runtime.interrupts import protected

__all__ = ["IncomingSegments"]

logger = logging.getLogger(__name__)

_SHARE_OF_DESCRIPTORS: Final = 4
_LARGE_BYTES: Final = 1 << 20
_SMALL_SHARE: Final = 16


class _Segment:
    """One segment of a peer, as its receiver sees it. It may be referenced (``in_use``), or kept forever,
    since this process was forked (``retired``).
    """

    def __init__(self, mapping: Mapping, slot: int, ledger: Ledger) -> None:
        self.mapping = mapping
        self.slot = slot
        self.ledger = ledger
        self.in_use = False
        self.retired = False

    def returned(self, use: int) -> None:
        """Note that nothing refers to the memory any more. From any thread, in the middle of any code."""
        self.in_use = False
        if self.retired:
            return  # another segment may have the slot by now
        self.ledger.words[self.slot] = use
        if self._was_retired():
            self.ledger.words[self.slot] = RETIRED

    def _was_retired(self) -> bool:
        """Whether this process was forked since ``retired`` was read."""
        return self.retired

    def retire(self) -> None:
        """Before a fork: keep the content, for this process and separate from its children."""
        self.retired = True
        self.ledger.words[self.slot] = RETIRED
        self.mapping.make_private()


class _Mapped:
    """All incoming segments of this process: tensors in them may outlive their peers, and their agent.
    ``lock`` is held while this process forks and while a segment is mapped, so that none is mapped in
    between.
    """

    def __init__(self) -> None:
        self.segments: weakref.WeakSet[_Segment] = weakref.WeakSet()
        self.lock = threading.RLock()
        os.register_at_fork(
            before=self._retire, after_in_parent=self.lock.release, after_in_child=self.lock.release
        )

    def _retire(self) -> None:
        self.lock.acquire()
        for segment in list(self.segments):
            if not segment.retired:
                try:
                    segment.retire()
                except OSError as error:
                    logger.error("tensors in shared memory will be shared with a forked child: %s", error)


_mapped: Final = functools.cache(_Mapped)


class _Memory:
    """The memory of one message, in the interface that numpy takes. When the last array over it is gone, it
    is returned.
    """

    __slots__ = ("__array_interface__", "_segment", "_use")

    def __init__(self, segment: _Segment, size: int, use: int) -> None:
        where = segment.mapping.address, False
        self.__array_interface__ = {"data": where, "shape": (size,), "typestr": "|u1", "version": 3}
        self._segment = segment
        self._use = use
        segment.in_use = True

    @protected
    def __del__(self) -> None:
        self._segment.returned(self._use)


class IncomingSegments:
    """The segments that one peer sends through, ``size`` bytes in all. On the loop's thread, except ``open``.

    The peer introduces them on the channel ``sock``; returns are noted in the ledger. ``bound`` is the
    maximum total size in bytes, and ``count`` the maximum number of segments.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        ledger: Ledger,
        bound: int,
        count: int,
    ) -> None:
        self.size = 0
        self._name = name
        self._loop = loop
        self._socket = sock
        self._ledger = ledger
        self._bound = bound
        self._count = count
        self._segments: dict[int, _Segment] = {}
        self._told = False

    def receive(self) -> None:
        """Accept the next segment that the peer introduces on the channel, if there is one. Raises
        ``ProtocolError`` if the record is not an introduction.
        """
        try:
            record, descriptor = fd_channel.receive(self._socket)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("no more segments come from worker '%s': %s", self._name, error)
            record = b""
        if not record:
            self._loop.remove_reader(self._socket.fileno())
            return
        try:
            if self._introduce(record, descriptor):
                descriptor = None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _introduce(self, record: bytes, descriptor: int | None) -> bool:
        """Accept a segment, which owns the descriptor then, or refuse it; its slot of the ledger says which.

        The descriptor is None if it did not arrive.
        """
        try:
            introduction = msgpack.unpackb(record)
        except MemoryError:
            raise
        except Exception as error:
            raise ProtocolError("a malformed introduction of a segment") from error
        match introduction:
            case [int(number), int(slot), int(size), int(use)] if (
                not any(type(each) is bool for each in introduction)
                and number not in self._segments
                and 0 <= slot < SLOTS
                and size > 0
                and 0 < use < REFUSED
            ):
                pass
            case _:
                raise ProtocolError("a malformed introduction of a segment")
        try:
            self._segments[number] = self._map(slot, size, descriptor)
        except (OSError, MemoryError, SegmentRefused) as error:
            self._ledger.words[slot] = REFUSED
            if not self._told:
                self._told = True
                name = self._name
                logger.warning(
                    "worker '%s' must send large tensors through the socket for now: %s", name, error
                )
            return False
        self.size += size
        self._ledger.words[slot] = use
        return True

    def _map(self, slot: int, size: int, descriptor: int | None) -> _Segment:
        if descriptor is None:
            raise SegmentRefused("a descriptor did not arrive: this process may have no more files open")
        if len(self._segments) >= self._count or self.size + size > self._bound:
            raise SegmentRefused(
                f"its segments would be more than {self._count}, or than {self._bound} bytes"
            )
        if len(_mapped().segments) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE_OF_DESCRIPTORS:
            raise SegmentRefused("too many of the files that this process may have open are segments")
        check(descriptor, size)
        with _mapped().lock:
            segment = _Segment(Mapping(descriptor, size, keep=True), slot, self._ledger)
            _mapped().segments.add(segment)
        return segment

    def open(self, number: int, use: int, lengths: Sequence[int], limit: int) -> list[memoryview]:
        """Return the memory that a message refers to: buffers of these lengths, which belong to the receiver.
        From any thread. Raises ``ProtocolError`` if there is no such memory, it is still in use, or it
        exceeds ``limit`` bytes.
        """
        segment = self._segments.get(number)
        if segment is None:
            raise ProtocolError("a message names no segment that was introduced")
        if segment.in_use:
            raise ProtocolError("a message names a segment whose memory is still in use here")
        offsets, size = places(lengths)
        if not (0 < use < REFUSED and size <= min(segment.mapping.size, limit)):
            raise ProtocolError(f"a message names {size} bytes of a segment of {segment.mapping.size}")
        whole: Any = np.asarray(_Memory(segment, size, use))
        return [_piece(whole, offset, length) for offset, length in zip(offsets, lengths, strict=True)]

    def drop(self, numbers: object) -> None:
        """Unmap segments that the peer will not use again. Raises ``ProtocolError`` if the message is not a
        list of numbers.
        """
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise ProtocolError("a malformed list of segments")
        for number in numbers:
            segment = self._segments.pop(number, None)
            if segment is not None:
                self.size -= segment.mapping.size

    def close(self) -> None:
        """Handle that the peer is lost. Memory of received tensors stays as it is; everything else is
        unmapped.
        """
        self._segments.clear()
        self.size = 0
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def abandon(self) -> None:
        """Release everything in a forked child; the parent continues to use its own."""
        self._segments.clear()
        os.close(self._socket.detach())


def _piece(whole: Any, offset: int, length: int) -> memoryview:
    """Return one buffer. It is copied later if it is a view of a small part of a large ``whole``."""
    end = offset + length
    if length < _LARGE_BYTES and length * _SMALL_SHARE < len(whole):
        return memoryview(whole)[offset:end]
    return memoryview(whole[offset:end])
