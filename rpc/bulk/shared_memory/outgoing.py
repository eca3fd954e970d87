"""The sending end: large buffers of messages to one peer are copied into segments that it has mapped."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple

import msgpack

from rpc.bulk import copying
from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory.memory import REFUSED, RETIRED, Ledger, Mapping, create
from rpc.bulk.shared_memory.packing import places
from rpc.bulk.shared_memory.pool import Pool, Segment
from rpc.group.peer import Peer

__all__ = ["Loan", "OutgoingSegments"]

_PAUSE_SECONDS: Final = 10.0


class Loan(NamedTuple):
    """Buffers that are in a segment now: the segment, the number of this use, and the lengths of the
    buffers.
    """

    segment: Segment
    use: int
    lengths: list[int]


class OutgoingSegments:
    """The segments through which messages are sent to one peer. From any thread. ``lock`` guards the agent's
    pool.

    ``discard`` is called with segments that are not in the pool any more, ``say`` with the reason why large
    messages do not go through segments.
    """

    def __init__(
        self,
        peer: Peer,
        pool: Pool,
        lock: threading.RLock,
        sock: socket.socket,
        ledger: Ledger,
        discard: Callable[[Sequence[Segment]], None],
        say: Callable[[str], None],
    ) -> None:
        self._peer = peer
        self._pool = pool
        self._lock = lock
        self._socket = sock
        self._ledger = ledger
        self._discard = discard
        self._say = say
        self._mappings: dict[int, Mapping] = {}
        self._unsent: set[int] = set()
        """Uses whose messages are not sent yet: the message that their segments are dropped must not overtake
        these.
        """
        self._paused_until = 0.0
        self._closed = False

    def lend(self, buffers: Sequence[memoryview]) -> Loan | None:
        """Copy the buffers of a message into a segment, if a suitable one is free.

        If there is none, one is made for the next message of that size, within the limits.
        """
        lengths = list(map(len, buffers))
        offsets, size = places(lengths)
        now = monotonic()
        with self._lock:
            useless = self._note_returns(now)
            segment = self._pool.lend(self._peer.incarnation, size, now)
            mapping = self._mappings.get(segment.number) if segment is not None else None
            if segment is not None:
                self._unsent.add(segment.use)
        self._give_up(useless, now)
        if segment is None or mapping is None:
            if now >= self._paused_until:
                self._add(size, now)
            return None
        loan = Loan(segment, segment.use, lengths)
        try:
            mapping.allocate()
        except OSError as error:
            self.withdraw(loan)
            self._pause(now, error.strerror or str(error))
            return None
        for offset, buffer in zip(offsets, buffers, strict=True):
            copying.copy(buffer, mapping.memory[offset : offset + len(buffer)])
        return loan

    def note_returns(self, now: float) -> None:
        """Read the ledger: what has been returned, or never will be."""
        with self._lock:
            useless = self._note_returns(now)
        self._give_up(useless, now)

    def _note_returns(self, now: float) -> list[tuple[Segment, int]]:
        """Note what has been returned; drop what never will be, and return it with its word. With the
        lock.
        """
        words = self._ledger.words
        useless: list[tuple[Segment, int]] = []
        for segment in self._pool.segments(self._peer.incarnation):
            word = words[segment.slot]
            if word == segment.use:
                if segment.lent:
                    self._pool.returned(segment, now)
            elif word in (RETIRED, REFUSED) and segment.use not in self._unsent:
                self._pool.drop(segment)
                useless.append((segment, word))
        return useless

    def _give_up(self, useless: Sequence[tuple[Segment, int]], now: float) -> None:
        """Notify the peer and the user that segments have left the pool; without the lock for that reason."""
        if useless:
            self._discard([segment for segment, _ in useless])
            if any(word == REFUSED for _, word in useless):
                self._pause(now, f"worker '{self._peer.name}' cannot take it; its log says why")

    def sent(self, loan: Loan) -> None:
        """Record that the message that refers to these buffers is sent."""
        self._unsent.discard(loan.use)

    def withdraw(self, loan: Loan) -> None:
        """Never use the segment of these buffers again, since the message was most likely not sent."""
        with self._lock:
            self._unsent.discard(loan.use)
            self._pool.drop(loan.segment, keep_slot=True)
        self._discard([loan.segment])

    def forget(self, segment: Segment) -> bool:
        """Unmap a segment; returns whether the peer knows it."""
        return self._mappings.pop(segment.number, None) is not None

    def _add(self, size: int, now: float) -> None:
        """Make one more segment and introduce it to the peer; the ledger shows when the peer has mapped
        it.
        """
        with self._lock:
            segment, dropped = self._pool.add(self._peer.incarnation, size, now)
            if segment is not None:
                self._ledger.words[segment.slot] = 0  # it may have the state of the slot's last segment
        if dropped:
            self._discard(dropped)
        if segment is None:
            return
        try:
            self._introduce(segment)
        except OSError as error:
            with self._lock:
                self._pool.drop(segment, keep_slot=True)
            self._discard([segment])
            self._pause(now, error.strerror or str(error))

    def _introduce(self, segment: Segment) -> None:
        descriptor = create(segment.size)
        try:
            mapping = Mapping(descriptor, segment.size, keep=True)
        except OSError:
            os.close(descriptor)
            raise
        record = msgpack.packb([segment.number, segment.slot, segment.size, segment.use])
        with self._lock:
            if not self._closed:
                self._mappings[segment.number] = mapping
                fd_channel.send(self._socket, record, descriptor)

    def _pause(self, now: float, reason: str) -> None:
        self._paused_until = now + _PAUSE_SECONDS
        self._say(reason)

    def close(self) -> None:
        """Use nothing again: the peer is lost."""
        with self._lock:
            self._closed = True
            self._pool.close(self._peer.incarnation)
            self._mappings.clear()
            self._socket.close()

    def abandon(self) -> None:
        """Release everything in a forked child, without taking a lock; the parent continues to use its
        own.
        """
        self._closed = True
        self._mappings.clear()
        os.close(self._socket.detach())
