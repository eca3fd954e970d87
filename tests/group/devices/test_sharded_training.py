"""What PyTorch builds on collectives, and tensor parallelism, on devices: it gives what one process gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.group.devices.test_collectives import collectives
from tests.support.devices import KIND, allow_reads_of_freed, device_kind, mode, on_devices
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def batches(size: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4 * size, 6) for _ in range(STEPS)]


def train(trained: Any, given: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for x in given:
        # FSDP frees gradients that the optimizer still reads, as their memory is used anew only after it. The
        # simulated device poisons freed memory at once.
        torch.accelerator.synchronize()
        optimizer.zero_grad()
        torch.autograd.backward(trained(x).square().mean())
        optimizer.step()


def expected(size: int) -> list[Tensor]:
    alone = model()
    train(alone, batches(size))
    return [each.detach() for each in alone.parameters()]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def _ddp(worker: Worker, device: str) -> nn.Module:
    trained = DistributedDataParallel(model().to(device), bucket_cap_mb=1)
    train(trained, [x.chunk(worker.world_size)[worker.rank].to(device) for x in batches(worker.world_size)])
    return trained


def _fsdp(worker: Worker, device: str) -> nn.Module:
    allow_reads_of_freed()
    mesh = init_device_mesh(KIND, (worker.world_size,))
    trained = model().to(device)
    for layer in (trained[0], trained[2], trained):
        fully_shard(layer, mesh=mesh)
    train(trained, [x.chunk(worker.world_size)[worker.rank].to(device) for x in batches(worker.world_size)])
    return trained


def _tensor_parallel(worker: Worker, device: str) -> nn.Module:
    mesh = init_device_mesh(KIND, (worker.world_size,))
    trained = model().to(device)
    parallelize_module(trained, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(trained, [x.to(device) for x in batches(worker.world_size)])
    return trained


TRAININGS: dict[str, Callable[[Worker, str], nn.Module]] = {
    "DistributedDataParallel": _ddp,
    "fully_shard": _fsdp,
    "tensor parallelism": _tensor_parallel,
}


@on_devices
def compare(worker: Worker, name: str) -> None:
    with collectives(worker) as device:
        trained = TRAININGS[name](worker, device)
        found = [whole(each) for each in trained.parameters()]
        for mine, alone in zip(found, expected(worker.world_size), strict=True):
            torch.testing.assert_close(mine, alone)


@pytest.mark.parametrize("name", TRAININGS)
def test_training_gives_what_one_process_gives(run_workers: RunWorkers, mode: str, name: str) -> None:
    if name != "DistributedDataParallel" and not hasattr(dist.ProcessGroup, "all_gather_single"):
        pytest.skip("needs PyTorch 2.13 or newer")
    run_workers(compare, 2, args=(mode, name), time_limit=60)


@on_devices
def redistribute(worker: Worker) -> None:
    with collectives(worker):
        mesh = init_device_mesh(KIND, (worker.world_size,))
        source = torch.arange(48.0).view(8, 6)
        rows = distribute_tensor(source.to(mesh.device_type), mesh, [Shard(0)])
        columns = rows.redistribute(placements=[Shard(1)])
        assert torch.equal(columns.to_local().cpu(), source.chunk(worker.world_size, 1)[worker.rank])
        assert torch.equal(whole(rows.redistribute(placements=[Replicate()])), source)
        assert torch.equal(whole(rows.sum()), source.sum())
        assert torch.equal(whole(rows @ columns.T), source @ source.T)


def test_distributed_tensors_move_their_shards(run_workers: RunWorkers, mode: str) -> None:
    if not hasattr(dist.ProcessGroup, "all_gather_single"):
        pytest.skip("needs PyTorch 2.13 or newer")
    run_workers(redistribute, 2, args=(mode,), time_limit=60)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(self.first(x).relu()))
        return out


@on_devices
def draw(worker: Worker) -> None:
    """Parameters and dropout are those that one process would draw on its device."""
    with collectives(worker) as device:
        mesh = init_device_mesh(KIND, (worker.world_size,))
        torch.manual_seed(3)
        alone = _Net().to(device)
        sharded = copy.deepcopy(alone)
        parallelize_module(sharded, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        for each in (alone, sharded):
            torch.manual_seed(5)
            for parameter in each.parameters():
                nn.init.normal_(parameter)
        for mine, theirs in zip(sharded.parameters(), alone.parameters(), strict=True):
            assert torch.equal(whole(mine), theirs.detach().cpu())
        weight = distribute_tensor(torch.ones(8, 8, device=device), mesh, [Shard(0)])
        torch.manual_seed(6)
        dropped = nn.functional.dropout(weight, 0.5)
        torch.manual_seed(6)
        assert torch.equal(whole(dropped), nn.functional.dropout(torch.ones(8, 8, device=device), 0.5).cpu())


def test_random_numbers_are_those_of_one_device(run_workers: RunWorkers, device_kind: str) -> None:
    if not hasattr(dist.ProcessGroup, "all_gather_single"):
        pytest.skip("needs PyTorch 2.13 or newer")
    run_workers(draw, 2, args=("lazy",), time_limit=60)
