"""A version of PyTorch without some private names: the log says what does not work, and the rest works."""

from __future__ import annotations

import pytest

from tests.support.fresh import RunFresh

WITHOUT = """
import torch, torch.distributed as dist
from torch.distributed.tensor import placement_types

del torch._C._autograd._record_function_with_args_enter
del placement_types.shard_dim_alltoall
import spmd

dist.init_process_group("farcall", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, requires_grad=True)
with torch.profiler.profile() as profile:
    dist.all_reduce(x)
assert x.is_leaf and x.tolist() == [1, 1]
assert not [event.key for event in profile.key_averages() if event.key.startswith("farcall:")]
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_what_is_missing_is_said_once_and_the_rest_works(run_fresh: RunFresh) -> None:
    done = run_fresh(WITHOUT)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "does not have" in line]
    assert [line.partition("does not have ")[2] for line in lines] == [
        "torch._C._autograd._record_function_with_args_enter: PyTorch's profiler does not show collectives",
        (
            "torch.distributed.tensor.placement_types.shard_dim_alltoall: DTensor gathers a tensor whenever "
            "it moves its shards to another dimension"
        ),
    ]
