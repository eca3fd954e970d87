"""Manual sharding, and the functions of DTensor, on the logical device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import spmd
from tests.group.spmd.driven import WORKERS, driven
from tests.group.spmd.sharded_layers import fsdp_mesh, on_device

pytestmark = pytest.mark.processes

ROWS = f"{{devices=[{WORKERS},1]0,1,2,3}}"


@pytest.mark.parametrize("rows", [8, 6])
@driven
def test_between_enable_and_disable_each_worker_computes_its_own(rows: int) -> None:
    whole = torch.arange(rows * 2.0).reshape(rows, 2)
    mesh = spmd.get_1d_mesh("data")
    spmd.set_global_mesh(mesh)
    part: Any = spmd.enable_manual_sharding(on_device(whole), ("data", None))
    assert part.shape == (2, 2)
    assert part.sharding_spec == "{manual}"
    assert part.sharding_type is spmd.ShardingType.MANUAL
    again: Any = spmd.disable_manual_sharding(part - part.max(), ("data", None), whole.shape)
    assert again.sharding_spec == ROWS
    expected = torch.cat([each - each.max() for each in torch.split(whole, 2)])
    assert again.cpu().equal(expected)


@driven
def test_manual_sharding_has_gradients() -> None:
    x = on_device(torch.ones(8, 2)).requires_grad_()
    mesh = spmd.get_1d_mesh("data")
    y = x * 1
    part = spmd.enable_manual_sharding(y, (0, None), mesh=mesh)
    y = spmd.disable_manual_sharding(part * part.sum(), (0, None), x.shape, mesh=mesh)
    torch.autograd.backward(y.sum())
    assert x.grad is not None
    assert x.grad.cpu().equal(torch.full((8, 2), 8.0))


@driven
def test_data_is_no_manual_shard() -> None:
    mesh = spmd.get_1d_mesh("data")
    with pytest.raises(RuntimeError, match="Marking any data tensors as manual is not supported"):
        spmd.disable_manual_sharding(on_device(torch.ones(2, 2)), (0, None), (8, 2), mesh=mesh)
    with pytest.raises(RuntimeError, match="not manual sharded"):
        spmd.disable_manual_sharding(on_device(torch.ones(3, 2)) + 1, (0, None), (8, 2), mesh=mesh)


@driven
def test_parts_of_workers_cannot_be_cut_themselves() -> None:
    mesh = spmd.get_1d_mesh("data")
    part = spmd.enable_manual_sharding(on_device(torch.arange(8.0)), (0,), mesh=mesh)
    with pytest.raises(RuntimeError, match="stands for each worker's part"):
        spmd.mark_sharding(part, mesh, (0,))
    assert spmd.disable_manual_sharding(part, (0,), (8,), mesh=mesh).cpu().equal(torch.arange(8.0))


# ---- DTensor's functions


def grid() -> spmd.Mesh:
    return spmd.Mesh(range(WORKERS), (2, 2), ("a", "b"))


@driven
def test_tensors_are_distributed_by_placements() -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    t: Any = spmd.distribute_tensor(whole, grid(), [Shard(0), Shard(1)])
    assert t.sharding_spec == "{devices=[2,2]0,1,2,3}"
    assert t.placements == (Shard(0), Shard(1))
    assert t.cpu().equal(whole)
    replicated: Any = spmd.distribute_tensor(whole, grid())
    assert replicated.sharding_spec == "{replicated}"
    with pytest.raises(ValueError, match="Unsupported placement type"):
        spmd.distribute_tensor(whole, grid(), [Partial(), Replicate()])
    with pytest.raises(ValueError, match="cut already"):
        spmd.distribute_tensor(t, grid(), [Replicate(), Shard(0)])


@driven
def test_tensors_are_redistributed_with_their_gradients() -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    t: Any = spmd.distribute_tensor(whole, grid(), [Shard(0), Replicate()]).requires_grad_()
    moved = t.redistribute(placements=[Replicate(), Shard(1)])
    assert moved.sharding_spec == "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"
    (moved * on_device(whole)).sum().backward()
    assert t.grad.sharding_spec == t.sharding_spec
    assert t.grad.cpu().equal(whole)
    with pytest.raises(ValueError, match="there are 1 placements"):
        t.redistribute(grid(), [Shard(0)])
    with pytest.raises(IndexError, match="out of range"):
        t.redistribute(grid(), [Shard(2), Replicate()])
    with pytest.raises(NotImplementedError, match="partial sums"):
        t.redistribute(grid(), [Partial(), Replicate()])


@driven
def test_modules_are_distributed_by_a_function() -> None:
    alone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module: Any = copy.deepcopy(alone)

    def rows(name: str, each: nn.Module, mesh: Any) -> None:
        for parameter in each.parameters(recurse=False):
            spmd.mark_sharding(parameter, mesh, ("a",) + (None,) * (parameter.dim() - 1))

    def cut(_: nn.Module, inputs: Any, mesh: Any) -> Any:
        return (spmd.mark_sharding(inputs[0], mesh, ("b", None)),)

    module = spmd.distribute_module(module, grid(), rows, cut, lambda _, output, mesh: output * 2)
    assert module[0].weight.sharding_spec == "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"
    x = torch.randn(4, 8)
    torch.testing.assert_close(module(on_device(x)).detach().cpu(), 2 * alone(x).detach())


@driven
def test_an_infinite_gradient_of_one_worker_halves_the_scale_of_all() -> None:
    w = nn.Parameter(on_device(torch.ones(WORKERS, 2)))
    spmd.mark_sharding(w, fsdp_mesh(), ("fsdp", None))
    optimizer, scaler = torch.optim.SGD([w], 0.5), torch.amp.GradScaler("spmd", init_scale=8.0)
    factors = torch.ones(WORKERS, 2)
    factors[1] = float("inf")
    cut = spmd.mark_sharding(on_device(factors), fsdp_mesh(), ("fsdp", None))
    loss: Any = scaler.scale((w * cut).sum())
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [[1.0, 1.0]] * WORKERS
    scale: Any = scaler.scale(on_device(torch.ones(())))
    assert [each.data.item() for each in scale.local_shards] == [4.0] * WORKERS
