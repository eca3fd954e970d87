"""What PyTorch builds on collectives, and tensor parallelism, on devices: it gives what one process gives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.group.devices.test_collectives import collectives
from tests.support.device_groups import on_device_workers
from tests.support.devices import KIND, allow_reads_of_freed, device_kind, mode
from tests.support.workers import Worker

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


@on_device_workers(mode="lazy")
def test_training_gives_what_one_process_gives(worker: Worker) -> None:
    with collectives(worker) as device:
        for training in (_ddp, _fsdp, _tensor_parallel):
            trained = training(worker, device)
            for mine, alone in zip(trained.parameters(), expected(worker.world_size), strict=True):
                torch.testing.assert_close(whole(mine), alone)


def drawn(x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    found = [functional.dropout(x), torch.rand_like(x), torch.randn_like(x)]
    return [whole(each) for each in (*found, nn.init.normal_(found[0]), torch.rand(2, device=x.device))]


@on_device_workers(mode="lazy")
def test_sharded_tensors_are_drawn_as_by_one_process(worker: Worker) -> None:
    with collectives(worker) as device:
        mesh = init_device_mesh(KIND, (worker.world_size,))
        parallelize_module(nn.Dropout(), mesh, {})
        x = torch.ones(5, 8, device=device)
        alone = drawn(x)
        for placement in (Shard(0), Shard(1), Replicate()):
            sharded = distribute_tensor(x, mesh, [placement])
            torch.testing.assert_close(drawn(sharded), alone, rtol=0, atol=0)


@on_device_workers(mode="lazy")
def test_ranks_whose_devices_are_seeded_differently_are_warned_of_dropout(worker: Worker) -> None:
    with collectives(worker) as device:
        mesh = init_device_mesh(KIND, (worker.world_size,))
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize_module(nn.Dropout(), mesh, {})
        torch.get_device_module(device).manual_seed(worker.rank)
        with pytest.warns(UserWarning, match=r"rank \d: the ranks of .* have different random generators"):
            parallelize_module(nn.Dropout(), mesh, {})


@on_device_workers(mode="lazy")
def test_distributed_tensors_move_their_shards(worker: Worker) -> None:
    with collectives(worker):
        mesh = init_device_mesh(KIND, (worker.world_size,))
        source = torch.arange(48.0).view(8, 6)
        rows = distribute_tensor(source.to(mesh.device_type), mesh, [Shard(0)])
        columns = rows.redistribute(placements=[Shard(1)])
        assert torch.equal(columns.to_local().cpu(), source.chunk(worker.world_size, 1)[worker.rank])
        assert torch.equal(whole(rows.redistribute(placements=[Replicate()])), source)
        assert torch.equal(whole(rows @ columns.T), source @ source.T)
