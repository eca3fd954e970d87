"""Every collective, on random tensors in groups of any size, gives what plain PyTorch computes."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from tests.group.spmd.calls import Calls
from tests.support.effort import EFFORT
from tests.support.process_groups import by_messages, process_group
from tests.support.workers import RunWorkers, Worker

PATHS = pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])


def make_random_calls(seed: int, apart: bool, worker: Worker) -> None:
    with process_group(worker, seconds=60, options=by_messages() if apart else None):
        Calls(seed, worker.rank, worker.world_size).run(60 * EFFORT)
        dist.barrier()


@PATHS
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_random_calls(run_workers: RunWorkers, size: int, apart: bool) -> None:
    run_workers(partial(make_random_calls, size, apart), size, time_limit=60 * EFFORT)


def make_calls_in_sub_groups(apart: bool, worker: Worker) -> None:
    """Overlapping groups, each rank's calls of its groups mixed in the same way."""
    with process_group(worker, seconds=60, options=by_messages() if apart else None):
        members = [[0, 1], [2, 3], [0, 2, 3], [1, 3]]
        groups = [dist.new_group(each) for each in members]
        calls = [
            (Calls(100 + number, each.index(worker.rank), len(each), group))
            for number, (each, group) in enumerate(zip(members, groups, strict=True))
            if worker.rank in each
        ]
        world = Calls(99, worker.rank, worker.world_size)
        for _ in range(3 * EFFORT):
            for each in calls:
                each.run(6)
            world.run(3)
        dist.barrier()


@PATHS
def test_sub_groups(run_workers: RunWorkers, apart: bool) -> None:
    run_workers(partial(make_calls_in_sub_groups, apart), 4, time_limit=60 * EFFORT)
