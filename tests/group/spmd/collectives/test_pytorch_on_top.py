"""What PyTorch builds on c10d runs on the backend ``farcall`` unchanged, and gives what one process gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.nn.functional
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.default_device import DEVICE, TYPE, allow_reads_of_freed, not_on_devices
from tests.support.process_groups import process_group
from tests.support.serving import in_standing
from tests.support.workers import Worker

dist_nn: Any = torch.distributed.nn.functional


def ranks(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs on each rank of a world of so many."""
    return in_standing(process_group, count)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def batches(worker: Worker, steps: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole batch of each step, and this rank's part."""
    torch.manual_seed(1)
    for _ in range(steps):
        whole = torch.randn(4 * worker.world_size, 6)
        yield whole, whole.chunk(worker.world_size)[worker.rank]


def loss_of(trained: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return trained(x).square().mean()


def step(trained: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(trained, x))
    optimizer.step()


@contextmanager
def trained_alike(trained: nn.Module, worker: Worker, steps: int = 3) -> Iterator[nn.Sequential]:
    """What one process makes of the same model with the whole batches."""
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for whole, _ in batches(worker, steps):
        step(alone, optimizer, whole)
    yield alone


# ---- data parallel


@ranks(2)
def test_zero_redundancy_optimizer_steps_like_adam(worker: Worker) -> None:
    parallel, alone = DistributedDataParallel(model()), model()
    sharded = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam, lr=0.1)
    whole_optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    for whole, mine in batches(worker):
        step(parallel, sharded, mine)
        step(alone, whole_optimizer, whole)
    torch.testing.assert_close(parallel.module.state_dict(), alone.state_dict(), atol=1e-5, rtol=1e-4)


# ---- sharded parameters, and their checkpoints


@ranks(3)
def test_fully_shard_trains_like_one_process(worker: Worker) -> None:
    allow_reads_of_freed()
    sharded = model()
    mesh = init_device_mesh(TYPE, (3,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _, mine in batches(worker):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(sharded, mine))
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1e6)
        optimizer.step()
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with trained_alike(sharded, worker) as alone:
        if worker.rank == 0:
            torch.testing.assert_close(whole, dict(alone.state_dict()), check_device=False)


# ---- meshes and DTensor


LAYOUTS: list[Placement] = [Replicate(), Shard(0), Shard(1)]


@ranks(3)
def test_all_pairs_of_layouts_hold_the_same_tensor(worker: Worker) -> None:
    mesh = init_device_mesh(TYPE, (3,))
    for shape in ((6, 9), (5, 7), (2, 4), (1, 1)):
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        for source, target in itertools.product(LAYOUTS, LAYOUTS):
            there = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            assert there.placements == (target,)
            assert torch.equal(there.full_tensor(), whole)
        for target in LAYOUTS:
            terms = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
            assert torch.equal(terms.redistribute(mesh, [target]).full_tensor(), whole * 3)


@ranks(2)
def test_resharding_moves_only_what_changes_its_place(worker: Worker) -> None:
    mesh = init_device_mesh(TYPE, (2,))
    group: Any = mesh.get_group()
    called: list[str] = []
    exchange = group.all_to_all_single

    def noted(*arguments: Any) -> Any:
        called.append("all_to_all")
        return exchange(*arguments)

    def refused(*_: Any) -> Any:
        pytest.fail("everything is gathered")

    with mock.patch.multiple(group, all_to_all_single=noted, allgather=refused):
        rows = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), torch.arange(16.0).view(4, 4).chunk(2, 1)[worker.rank])
    assert called == ["all_to_all"]


@ranks(8)
def test_meshes_of_three_dimensions_reduce_along_each(worker: Worker) -> None:
    mesh = init_device_mesh(TYPE, (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    place = mesh.get_coordinate()
    assert place is not None
    for dim, name in enumerate(("pp", "dp", "tp")):
        tensor = torch.tensor(float(worker.rank))
        dist.all_reduce(tensor, group=mesh[name].get_group())
        other = worker.rank ^ (4 >> dim)
        assert tensor.item() == worker.rank + other
    both = mesh["dp", "tp"]._flatten("data")
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor, group=both.get_group())
    assert tensor.item() == 4


# ---- pipelines


SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


def stage_modules(count: int) -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


@not_on_devices("the simulated device cannot resize what these pipelines do")
@pytest.mark.parametrize("name", list(SCHEDULES))
@ranks(2)
def test_pipelines_have_the_gradients_of_one_process(worker: Worker, name: str) -> None:
    schedule, per_rank = SCHEDULES[name]
    count = 2 * per_rank
    mine = [index for index in range(count) if index % 2 == worker.rank]
    modules = stage_modules(count)
    stages = [PipelineStage(modules[index], index, count, torch.device(DEVICE)) for index in mine]
    torch.manual_seed(3)
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    runner = schedule(stages if per_rank > 1 else stages[0], 4, loss_fn=nn.MSELoss())
    first = {"args": (x,)} if worker.rank == 0 else {"args": ()}
    last = {"target": target} if worker.rank == 1 else {}
    runner.step(*first["args"], **last)
    alone = stage_modules(count)
    torch.autograd.backward(nn.functional.mse_loss(nn.Sequential(*alone)(x), target))
    for index in mine:
        for one, other in zip(modules[index].parameters(), alone[index].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


# ---- functional collectives


@ranks(2)
def test_collectives_of_autograd_pass_gradients_back(worker: Worker) -> None:
    x = torch.full((3,), float(worker.rank + 1), requires_grad=True)
    torch.autograd.backward((dist_nn.all_reduce(x) * (worker.rank + 1)).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    y = torch.full((2,), float(worker.rank), requires_grad=True)
    gathered = torch.stack(list(dist_nn.all_gather(y)))
    assert gathered.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    torch.autograd.backward(gathered.sum())
    assert y.grad is not None
    assert y.grad.tolist() == [2.0, 2.0]


@ranks(2)
def test_functional_collectives_leave_their_inputs_alone(worker: Worker) -> None:
    group: Any = dist.group.WORLD
    mine = torch.arange(4.0) + 10 * worker.rank
    kept = mine.clone()
    total = torch.arange(4.0) * 2 + 10
    assert torch.equal(functional.all_reduce(mine, "sum", group), total)
    assert torch.equal(
        functional.all_gather_tensor(mine, 0, group), torch.cat([torch.arange(4.0), torch.arange(4.0) + 10])
    )
    assert torch.equal(functional.reduce_scatter_tensor(mine, "sum", 0, group), total.chunk(2)[worker.rank])
    assert torch.equal(functional.broadcast(mine, 0, group), torch.arange(4.0))
    exchanged = functional.all_to_all_single(mine, [2, 2], [2, 2], group)
    start = 2.0 * worker.rank
    assert exchanged.tolist() == [start, start + 1, start + 10, start + 11]
    several = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    assert [each.tolist() for each in several] == [total.tolist(), (total * 2).tolist()]
    assert torch.equal(mine, kept)
