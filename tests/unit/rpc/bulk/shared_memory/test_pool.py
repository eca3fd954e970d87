"""The pool's account: what is lent is lent once, to the peer it was made for, and the bounds hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rpc.bulk.shared_memory.pool import Limits, Pool, Segment
from tests.support.effort import PROFILE, examples

MIB = 1 << 20
LIMITS = Limits(size=64 * MIB, count=8, slots=16)
PEER, OTHER = 1, 2


def open_pool(bound: int = 64 * MIB, limits: Limits = LIMITS) -> Pool:
    pool = Pool(bound)
    pool.open(PEER, limits)
    pool.open(OTHER, limits)
    return pool


def add(pool: Pool, size: int, now: float = 0.0, peer: int = PEER) -> Segment:
    segment, _ = pool.add(peer, size, now)
    assert segment is not None
    pool.returned(segment, now)
    return segment


def test_one_that_is_far_too_large_is_not_lent() -> None:
    pool = open_pool()
    add(pool, 32 * MIB)
    assert pool.lend(PEER, 2 * MIB, 0.0) is None


@pytest.mark.parametrize("size", [1, 65_536, 65_537, MIB, 3 * MIB + 5, 33 * MIB])
def test_a_segment_is_hardly_larger_than_asked_for(size: int) -> None:
    segment = add(open_pool(), size)
    assert size <= segment.size <= size + max(65_536, size // 16)


def test_rested_segments_give_way_those_first_that_rested_longest() -> None:
    pool = open_pool(bound=4 * MIB)
    first, second = add(pool, 2 * MIB, 10.0, PEER), add(pool, 2 * MIB, 20.0, OTHER)
    segment, dropped = pool.add(OTHER, 2 * MIB, 30.0)
    assert segment is not None
    assert dropped == [first]
    assert pool.segments(OTHER) == [second, segment]


def test_segments_in_use_a_moment_ago_do_not_give_way() -> None:
    pool = open_pool(bound=4 * MIB)
    add(pool, 4 * MIB, 10.0)
    assert pool.add(PEER, 3 * MIB, 10.5) == (None, [])


def test_a_peer_has_no_more_segments_than_it_takes() -> None:
    pool = open_pool(limits=Limits(size=64 * MIB, count=2, slots=16))
    first, _ = pool.add(PEER, MIB, 0.0)
    second = add(pool, MIB)
    assert pool.add(PEER, 2 * MIB, 0.0) == (None, [])
    third, dropped = pool.add(PEER, 2 * MIB, 9.0)
    assert dropped == [second]
    assert pool.segments(PEER) == [first, third]


def test_what_may_still_be_returned_keeps_its_word() -> None:
    pool = open_pool(limits=Limits(size=64 * MIB, count=8, slots=1))
    pool.drop(add(pool, MIB), keep_slot=True)
    assert pool.add(PEER, MIB, 0.0) == (None, [])
    pool = open_pool(limits=Limits(size=64 * MIB, count=8, slots=1))
    pool.drop(add(pool, MIB))
    assert pool.add(PEER, MIB, 0.0)[0] is not None


def test_a_slot_that_becomes_free_serves_after_all_others() -> None:
    pool = open_pool(limits=Limits(size=64 * MIB, count=8, slots=3))
    slots = []
    for _ in range(6):
        segment = add(pool, MIB)
        slots.append(segment.slot)
        pool.drop(segment)
    assert slots == [0, 1, 2, 0, 1, 2]


def test_trimming_drops_what_is_free_and_has_rested() -> None:
    pool = open_pool()
    rested, recent = add(pool, MIB, 0.0), add(pool, MIB, 8.0)
    lent = add(pool, 2 * MIB, 0.0)
    pool.lend(PEER, 2 * MIB, 0.0)
    assert pool.trim(10.0, 5.0) == [rested]
    assert pool.segments(PEER) == [recent, lent]


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of events, beside a plain account of what is out."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = open_pool(bound=20 * MIB, limits=Limits(size=16 * MIB, count=4, slots=6))
        self.now = 0.0
        self.out: dict[Segment, int] = {}

    sizes = st.sampled_from([1, 100_000, MIB, 5 * MIB, 9 * MIB, 30 * MIB])
    peers = st.sampled_from([PEER, OTHER])
    segments = Bundle("segments")

    @rule(target=segments, peer=peers, size=sizes)
    def add(self, peer: int, size: int) -> Segment | None:
        segment, dropped = self.pool.add(peer, size, self.now)
        assert not self.out.keys() & set(dropped)
        if segment is not None:
            assert segment.size >= size
            self.out[segment] = segment.use
        return segment

    @rule(peer=peers, size=sizes)
    def lend(self, peer: int, size: int) -> None:
        segment = self.pool.lend(peer, size, self.now)
        if segment is not None:
            assert segment not in self.out
            assert segment.peer == peer
            assert segment.size >= size
            self.out[segment] = segment.use

    @rule(segment=segments)
    def give_back(self, segment: Segment | None) -> None:
        if segment is not None and self.out.get(segment) == segment.use:
            del self.out[segment]
            self.pool.returned(segment, self.now)

    @rule(segment=segments, keep=st.booleans())
    def drop(self, segment: Segment | None, keep: bool) -> None:
        if segment is not None:
            self.pool.drop(segment, keep_slot=keep)
            self.out.pop(segment, None)

    @rule(peer=peers)
    def lose(self, peer: int) -> None:
        for segment in self.pool.close(peer):
            self.out.pop(segment, None)
        self.pool.open(peer, Limits(size=16 * MIB, count=4, slots=6))

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def trim(self) -> None:
        assert not self.out.keys() & set(self.pool.trim(self.now, 5.0))

    @invariant()
    def bounds_hold(self) -> None:
        everything = self.pool.all_segments()
        assert self.pool.size == sum(each.size for each in everything) <= 20 * MIB
        assert len({each.number for each in everything}) == len(everything)
        for peer in (PEER, OTHER):
            mine = self.pool.segments(peer)
            assert len(mine) <= 4
            assert sum(each.size for each in mine) <= 16 * MIB
            assert len({each.slot for each in mine}) == len(mine)
        assert {each for each in everything if each.lent} == set(self.out)


PoolMachine.TestCase.settings = settings(PROFILE, max_examples=examples(60), stateful_step_count=40)
test_any_sequence_of_events = PoolMachine.TestCase
