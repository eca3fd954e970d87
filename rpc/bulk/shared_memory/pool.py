"""Which segment is free, which is lent, and how much memory they take together. Pure: no memory, no clock.

Every segment is made for one peer and never serves another: that one goes on seeing its memory. A segment is
*lent* under a number that grows with each use, and is free again when exactly that use has been returned.
What cannot be returned for certain (the peer is gone, the message was perhaps not sent) is dropped and never
lent again. A slot that becomes free serves next after all others: until the peer knows that the segment was
dropped, it may still note there that it has forked.

The pool is bounded in bytes, over all peers, and each peer besides in bytes and in segments. Beyond that,
free segments that have rested for a moment give way; when none has, there is simply no segment. So two sizes
that do not fit in together do not have segments made and unmade with each message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Limits", "Pool", "Segment"]

_GRAIN: Final = 64 << 10
_STEPS: Final = 16
"""Sizes between a power of two and the next: a segment is at most one sixteenth larger than asked for."""

_ROOMY: Final = 4
_SMALL_BYTES: Final = 1 << 20
_REST_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class Segment:
    """One segment, as its sender keeps account of it."""

    number: int  # names it between two peers; never used twice
    peer: int  # the incarnation of the worker that it was made for
    slot: int  # which word of the ledger its returns are noted in
    size: int  # bytes
    use: int  # the number of the current use, or of the last one
    lent: bool  # that use has not been returned yet
    since: float  # when it was last lent or returned, in seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer takes at most: bytes of all its segments, how many, and words in the ledger."""

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
        bound: bytes of all segments together.

    Attributes:
        size: bytes of all segments, free or lent.
    """

    def __init__(self, bound: int) -> None:
        self.size = 0
        self._bound = bound
        self._numbers = 0
        self._accounts: dict[int, _Account] = {}

    def open(self, peer: int, limits: Limits) -> None:
        """From now on segments can be made for a peer."""
        self._accounts[peer] = _Account(limits, slots=deque(range(limits.slots)))

    def segments(self, peer: int) -> list[Segment]:
        """A peer's segments."""
        account = self._accounts.get(peer)
        return list(account.segments) if account else []

    def all_segments(self) -> list[Segment]:
        """Everybody's segments."""
        return [segment for account in self._accounts.values() for segment in account.segments]

    def lend(self, peer: int, size: int, now: float) -> Segment | None:
        """The best free segment for so many bytes, lent from now on; None if there is none.

        One that is far too large is none: what is received would hold all of it.
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
        """A new segment for so many bytes, if there is room for one, and free ones that were dropped to make
        room.

        It begins as lent: its first use is that the peer gets to know it.
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
        """The current use is over."""
        segment.lent = False
        segment.since = now

    def drop(self, segment: Segment, *, keep_slot: bool = False) -> None:
        """Forget a segment: it will not be lent again. With ``keep_slot``, the peer may still note the return
        of its last use, so its word must serve no other.
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
        """A peer is gone: all its segments are dropped."""
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
        """Drop rested segments until there is room, those that have rested longest first; None if there is
        no way, and then nothing is dropped.
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
    """A size that also serves somewhat larger messages."""
    step = max(_GRAIN, (1 << max(0, size - 1).bit_length()) // 2 // _STEPS)
    return -(-max(1, size) // step) * step
