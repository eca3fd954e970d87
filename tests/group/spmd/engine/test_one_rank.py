"""Collectives of ``torch.distributed`` on tensors on the device: the driver is one process, with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import spmd
from spmd.engine.errors import SpmdError
from tests.group.spmd.driven import driven

pytestmark = pytest.mark.processes


@contextmanager
def group_of_this_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def there(*shape: int) -> Any:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(spmd.device())


@driven
def test_collectives_leave_tensors_as_they_are_or_copy_them() -> None:
    with group_of_this_process():
        t, expected = there(2, 3), there(2, 3).cpu()
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        dist.broadcast(t, 0)
        work = dist.all_reduce(t, async_op=True)
        assert work is not None
        work.wait()
        dist.reduce(t, 0)
        assert t.cpu().equal(expected)
        outputs = [torch.zeros(2, 3, device=t.device) for _ in range(6)]
        dist.all_gather(outputs[:1], t)
        dist.all_gather_into_tensor(outputs[1], t)
        dist.reduce_scatter(outputs[2], [t])
        dist.reduce_scatter_tensor(outputs[3], t)
        dist.all_to_all_single(outputs[4], t)
        dist.scatter(outputs[5], [t])
        assert all(each.cpu().equal(expected) for each in outputs)


@driven
def test_data_parallel_training_is_that_of_the_module() -> None:
    with group_of_this_process():
        models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(spmd.device()) for _ in "12"]
        models[1].load_state_dict(models[0].state_dict())
        trained: list[nn.Module] = [
            DistributedDataParallel(models[0], gradient_as_bucket_view=True),
            models[1],
        ]
        for model in trained:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                torch.autograd.backward(model(there(3, 4)).sum())
                optimizer.step()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert one.cpu().equal(other.cpu())


@driven
def test_a_message_to_another_rank_is_refused() -> None:
    with group_of_this_process(), pytest.raises(SpmdError, match="mark_sharding"):
        torch.ops.c10d.send([there(2)], dist.group.WORLD.boxed(), 0, 0)  # type: ignore[union-attr]
