"""Schedules of messages: all ranks of a schedule together, for every group of up to 17 ranks."""

from __future__ import annotations

import inspect
import operator
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from spmd.collectives.between_hosts import schedules
from spmd.collectives.between_hosts.schedules import CHAINED_BYTES, SMALL_BYTES, Step

Block = Any
"""A number with a digit for each rank: how often its block was reduced into this one. Or whose it is."""

SIZES = range(1, 18)
TOTALS = (8, SMALL_BYTES, SMALL_BYTES + 1, SMALL_BYTES * 18, CHAINED_BYTES * 9 + 1, CHAINED_BYTES * 18)


class Run:
    """All ranks' steps, done as far as messages let them; what is sent first comes first.

    Attributes:
        sent: how many blocks each rank has sent.
        messages: how many messages were taken one after the other, at most, in the longest chain.
    """

    def __init__(
        self,
        blocks: list[list[Block]],
        steps: Sequence[Sequence[Step]],
        reduce: Callable[[Block, Block], Block] = operator.add,
    ) -> None:
        size = len(steps)
        self.blocks = blocks
        self.sent = [0] * size
        depth = [0] * size
        channels: dict[tuple[int, int], deque[tuple[int, list[Block]]]] = {}
        todo = [deque(each) for each in steps]
        has_sent = [False] * size
        moved = True
        while moved:
            moved = False
            for rank in range(size):
                while todo[rank]:
                    step = todo[rank][0]
                    if step.to >= 0 and not has_sent[rank]:
                        data = [blocks[rank][each] for each in step.sends]
                        channels.setdefault((rank, step.to), deque()).append((depth[rank], data))
                        self.sent[rank] += len(data)
                        has_sent[rank] = moved = True
                    if step.source >= 0:
                        channel = channels.get((step.source, rank))
                        if not channel:
                            break
                        came_after, data = channel.popleft()
                        depth[rank] = max(depth[rank], came_after + 1)
                        assert len(data) == len(step.takes)
                        for each, block in zip(step.takes, data, strict=True):
                            blocks[rank][each] = reduce(blocks[rank][each], block) if step.reduces else block
                    todo[rank].popleft()
                    has_sent[rank] = False
                    moved = True
        assert not any(todo), "ranks wait for each other"
        assert not any(channels.values()), "messages are left over"
        self.messages = max(depth)


def run(size: int, steps: Callable[[int], Sequence[Step]], start: Callable[[int], list[Block]]) -> Run:
    return Run([start(rank) for rank in range(size)], [steps(rank) for rank in range(size)])


def every_size(test: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of one that is given the size of a group, and perhaps how many bytes it exchanges."""

    def with_bytes(total: int) -> None:
        for size in SIZES:
            test(size, total)

    def without() -> None:
        for size in SIZES:
            test(size)

    takes_bytes = "total" in inspect.signature(test).parameters
    return pytest.mark.parametrize("total", TOTALS)(with_bytes) if takes_bytes else without


def only(rank: int) -> Block:
    return 1 << 6 * rank


def each_once(size: int) -> Block:
    return sum(only(rank) for rank in range(size))


def rounds(size: int) -> int:
    """How often a number can be doubled, from 1, before all of ``size`` are reached."""
    return (size - 1).bit_length()


@every_size
def test_all_reduce_reduces_each_rank_once_into_every_block(size: int, total: int) -> None:
    count = schedules.count_blocks(size, total)
    done = run(size, lambda rank: schedules.all_reduce(rank, size, total), lambda rank: [only(rank)] * count)
    assert done.blocks == [[each_once(size)] * count] * size
    if count > 1:  # as few bytes as can be
        assert done.sent == [2 * (size - 1)] * size
    else:
        assert done.messages <= rounds(size) + 2


@every_size
def test_all_ranks_reduce_in_an_order_that_gives_the_same_bits(size: int, total: int) -> None:
    # A block is the tree of what was reduced with what; reducing two is commutative.
    count = schedules.count_blocks(size, total)
    trees = [[rank] * count for rank in range(size)]
    steps = [schedules.all_reduce(rank, size, total) for rank in range(size)]
    done = Run(trees, steps, lambda mine, other: frozenset((mine, other)))
    for block in range(count):
        assert len({done.blocks[rank][block] for rank in range(size)}) == 1


@every_size
def test_reduce_scatter_reduces_each_ranks_own_block(size: int, total: int) -> None:
    done = run(
        size, lambda rank: schedules.reduce_scatter(rank, size, total), lambda rank: [only(rank)] * size
    )
    assert [done.blocks[rank][rank] for rank in range(size)] == [each_once(size)] * size
    assert done.sent == [size - 1] * size


@every_size
def test_all_gather_brings_every_block_everywhere(size: int, total: int) -> None:
    def start(rank: int) -> list[Block]:
        return [only(rank) if each == rank else None for each in range(size)]

    done = run(size, lambda rank: schedules.all_gather(rank, size, total), start)
    assert done.blocks == [[only(each) for each in range(size)]] * size
    assert done.sent == [size - 1] * size


@every_size
def test_broadcast_brings_the_roots_blocks_everywhere(size: int, total: int) -> None:
    for root in range(size):
        count = schedules.count_broadcast_blocks(size, total)

        def start(rank: int, root: int = root, count: int = count) -> list[Block]:
            return [only(each) if rank == root else None for each in range(count)]

        done = run(size, lambda rank, root=root: schedules.broadcast(rank, size, total, root), start)  # type: ignore[misc]
        assert done.blocks == [[only(each) for each in range(count)]] * size
        if size > 2 and total >= size * CHAINED_BYTES:  # each rank sends all bytes once, block after block
            assert max(done.sent) == count
            assert done.messages == size - 1
            assert count * CHAINED_BYTES < total + CHAINED_BYTES
        else:
            assert max(done.sent) <= (rounds(size) * count if size <= 2 or count == 1 else 2 * (size - 1))
        assert count > 1 or done.messages <= rounds(size)


@every_size
def test_reduce_brings_each_rank_once_to_the_root(size: int) -> None:
    for root in range(size):
        steps = [schedules.reduce(rank, size, root) for rank in range(size)]
        done = Run([[only(rank)] for rank in range(size)], steps)
        assert done.blocks[root] == [each_once(size)]
        assert sum(done.sent) == size - 1
        assert done.messages <= rounds(size)


@every_size
def test_all_to_all_brings_each_pair_its_own_block(size: int) -> None:
    def start(rank: int) -> list[Block]:
        return [(rank, other) for other in range(size)] + [None] * size

    done = run(size, lambda rank: schedules.all_to_all(rank, size), start)
    for rank in range(size):
        for other in range(size):
            if other != rank:
                assert done.blocks[rank][size + other] == (other, rank)
    assert done.sent == [size - 1] * size


@every_size
def test_gather_and_scatter_move_one_block_of_each_rank(size: int) -> None:
    for root in range(size):
        gathered = Run(
            [[only(rank)] * size for rank in range(size)],
            [schedules.gather(rank, size, root) for rank in range(size)],
        )
        assert gathered.blocks[root] == [only(each) for each in range(size)]
        scattered = Run(
            [[(rank, each) for each in range(size)] for rank in range(size)],
            [schedules.scatter(rank, size, root) for rank in range(size)],
        )
        for rank in range(size):
            assert scattered.blocks[rank][rank] == (root, rank)
        assert sum(gathered.sent) == sum(scattered.sent) == size - 1


@every_size
def test_nobody_is_through_a_barrier_before_all_have_begun(size: int) -> None:
    for late in range(size):
        steps = [[] if rank == late else schedules.barrier(rank, size) for rank in range(size)]
        assert size == 1 or not any(comes_through(steps)[:late] + comes_through(steps)[late + 1 :])
    Run([[] for _ in range(size)], [schedules.barrier(rank, size) for rank in range(size)])


def comes_through(steps: Sequence[Sequence[Step]]) -> list[bool]:
    """Which ranks end, where one has not begun."""
    size = len(steps)
    sent: Counter[tuple[int, int]] = Counter()
    places, has_sent = [0] * size, [-1] * size
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            while places[rank] < len(steps[rank]):
                step = steps[rank][places[rank]]
                if has_sent[rank] < places[rank]:
                    sent[rank, step.to] += 1
                    has_sent[rank] = places[rank]
                if not sent[step.source, rank]:
                    break
                sent[step.source, rank] -= 1
                places[rank] += 1
                moved = True
    return [places[rank] == len(steps[rank]) and bool(steps[rank]) for rank in range(size)]


@every_size
def test_no_block_changes_that_its_receiver_may_still_be_reading(size: int, total: int) -> None:
    """A block that was sent changes only in the step that sends it, where the sender can wait for it to
    arrive, or by a message that is sent only after it has arrived.
    """
    for rank in range(size):
        sent: set[int] = set()
        for step in schedules.all_reduce(rank, size, total):
            if step.reduces:
                assert not sent & set(step.takes)
            if not set(step.sends) & set(step.takes):
                sent |= set(step.sends)
