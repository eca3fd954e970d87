"""How much the schedules send, and in how many steps, in groups of up to 17 ranks."""

from __future__ import annotations

import pytest

from spmd.collectives.between_hosts import schedules
from spmd.collectives.between_hosts.schedules import CHAINED_BYTES, SMALL_BYTES, Step

SIZES = pytest.mark.parametrize("size", range(2, 18))


def sent(steps: list[Step]) -> int:
    return sum(len(step.sends) for step in steps)


@SIZES
def test_large_tensors_are_sent_as_few_times_as_possible(size: int) -> None:
    total = SMALL_BYTES * 18
    large = CHAINED_BYTES * size
    for rank in range(size):
        assert sent(schedules.all_reduce(rank, size, total)) == 2 * (size - 1)
        for root in range(size):
            count = schedules.count_broadcast_blocks(size, large)
            assert sent(schedules.broadcast(rank, size, large, root)) <= count
        for each in (schedules.reduce_scatter, schedules.all_gather):
            assert sent(each(rank, size, total)) == size - 1
        assert sent(schedules.all_to_all(rank, size)) == size - 1


@SIZES
def test_small_tensors_need_few_steps(size: int) -> None:
    doublings = (size - 1).bit_length()
    for rank in range(size):
        assert len(schedules.all_reduce(rank, size, SMALL_BYTES)) <= doublings + 2
        assert len(schedules.barrier(rank, size)) == doublings
        for root in range(size):
            for steps in (
                schedules.broadcast(rank, size, SMALL_BYTES, root),
                schedules.reduce(rank, size, root),
            ):
                assert len(steps) <= doublings
