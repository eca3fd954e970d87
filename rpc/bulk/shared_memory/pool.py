"""Which segments are free or lent, and how much memory they take together. Pure: no memory, no clock.

Every segment is made for one peer and never used for another, since the peer can still read its memory. A
segment is *lent* under a number that grows with each use, and is free again when exactly that use has been
returned. A segment that may never be returned (the peer is lost, the message was perhaps not sent) is dropped
and never lent again. A slot that becomes free is used again after all others: until the peer knows that the
segment was dropped, it may still note there that it has forked.

The pool is bounded in bytes, over all peers, and for each peer in bytes and in segments. Beyond these limits,
free segments that have been unused for a moment are dropped; if there is none, no segment is made. So two
sizes that do not fit together do not cause segments to be made and dropped with each message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Limits", "Pool", "Segment"]

_GRAIN: Final = 64 << 10
_STEPS: Final = 16
"""Number of sizes between a power of two and the next: a segment is at most one sixteenth larger than
required.
"""

_ROOMY: Final = 4
_SMALL_BYTES: Final = 1 << 20
_REST_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class Segment:
    """One segment, as its sender keeps account of it."""

    number: int  # identifies it between two peers; never used twice
    peer: int  # incarnation of the worker that it was made for
    slot: int  # word of the ledger in which its returns are noted
    size: int  # in bytes
    use: int  # number of the current use, or of the last one
    lent: bool  # whether that use has not been returned yet
    since: float  # time when it was last lent or returned, in seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one peer: total bytes of its segments, their number, and the number of words in the
    ledger.
    """

    size: int
    count: int
    slots: int


@dataclass(slots=True)
class _Account:
    limits: Limits
    segments: list[Segment] = field(default_factory=list)
    size: int = 0
    slots: deque[int] = field(default_factory=deque)
    uses: int = 0


class Pool:
    """All segments that one agent sends through. For one thread at a time.

    Args:
        bound: maximum size of all segments together, in bytes.

    Attributes:
        size: size of all segments, free or lent, in bytes.
    """

    def __init__(self, bound: int) -> None:
        self.size = 0
        self._bound = bound
        self._numbers = 0
        self._accounts: dict[int, _Account] = {}

    def open(self, peer: int, limits: Limits) -> None:
        """Allow segments to be made for a peer from now on."""
        self._accounts[peer] = _Account(limits, slots=deque(range(limits.slots)))

    def segments(self, peer: int) -> list[Segment]:
        """Return a peer's segments."""
        account = self._accounts.get(peer)
        return list(account.segments) if account else []

    def all_segments(self) -> list[Segment]:
        """Return the segments of all peers."""
        return [segment for account in self._accounts.values() for segment in account.segments]

    def lend(self, peer: int, size: int, now: float) -> Segment | None:
        """Lend the best free segment for ``size`` bytes; None if there is none.

        One that is far too large does not count: the received tensor would hold all of it.
        """
        account = self._accounts.get(peer)
        if account is None:
            return None
        roomy = max(_ROOMY * size, _SMALL_BYTES)
        best: Segment | None = None
        for segment in account.segments:
            fits = not segment.lent and size <= segment.size <= roomy
            if fits and (best is None or (segment.size, -segment.since) < (best.size, -best.since)):
                best = segment
        if best is not None:
            account.uses += 1
            best.use = account.uses
            best.lent = True
            best.since = now
        return best

    def add(self, peer: int, size: int, now: float) -> tuple[Segment | None, list[Segment]]:
        """Add a segment for ``size`` bytes, if there is room; returns it, and free ones that were dropped to
        make room.

        It begins as lent: its first use is its introduction to the peer.
        """
        account = self._accounts.get(peer)
        if account is None:
            return None, []
        wanted = _rounded(size)
        dropped = self._make_room(account, wanted, now)
        if dropped is None:
            return None, []
        self._numbers += 1
        account.uses += 1
        segment = Segment(self._numbers, peer, account.slots.popleft(), wanted, account.uses, True, now)
        account.segments.append(segment)
        account.size += wanted
        self.size += wanted
        return segment, dropped

    def returned(self, segment: Segment, now: float) -> None:
        """Record that the current use is over."""
        segment.lent = False
        segment.since = now

    def drop(self, segment: Segment, *, keep_slot: bool = False) -> None:
        """Forget a segment: it will not be lent again. With ``keep_slot``, the peer may still note the return
        of its last use, so its word must not be used for another.
        """
        account = self._accounts.get(segment.peer)
        if account is None or segment not in account.segments:
            return
        account.segments.remove(segment)
        account.size -= segment.size
        self.size -= segment.size
        if not keep_slot:
            account.slots.append(segment.slot)

    def close(self, peer: int) -> list[Segment]:
        """Drop all segments of a peer that is lost."""
        account = self._accounts.pop(peer, None)
        if account is None:
            return []
        self.size -= account.size
        return account.segments

    def trim(self, now: float, idle: float) -> list[Segment]:
        """Drop the segments that have been free for ``idle`` seconds."""
        dropped = [each for each in self.all_segments() if not each.lent and now - each.since >= idle]
        for segment in dropped:
            self.drop(segment)
        return dropped

    def _make_room(self, account: _Account, size: int, now: float) -> list[Segment] | None:
        """Drop unused segments until there is room, those first that have been unused for longest. None if
        that is impossible, in which case nothing is dropped.
        """
        limits = account.limits
        rested = [each for each in self.all_segments() if not each.lent and now - each.since >= _REST_SECONDS]
        rested.sort(key=lambda each: each.since)
        own = [each for each in rested if each in account.segments]
        if (
            account.size - _bytes(own) + size > limits.size
            or len(account.segments) - len(own) >= limits.count
            or not (own or account.slots)
            or self.size - _bytes(rested) + size > self._bound
        ):
            return None
        dropped: list[Segment] = []
        while account.size + size > limits.size or len(account.segments) >= limits.count or not account.slots:
            dropped.append(own.pop(0))
            self.drop(dropped[-1])
        others = [each for each in rested if each not in dropped]
        while self.size + size > self._bound:
            dropped.append(others.pop(0))
            self.drop(dropped[-1])
        return dropped


def _bytes(segments: list[Segment]) -> int:
    return sum(each.size for each in segments)


def _rounded(size: int) -> int:
    """Round a size up, so that the segment also fits somewhat larger messages."""
    step = max(_GRAIN, (1 << max(0, size - 1).bit_length()) // 2 // _STEPS)
    return -(-max(1, size) // step) * step
