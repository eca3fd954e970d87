"""DTensor's interface on a mesh of ``"xla"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes

ROWS = f"{{devices=[4,1]{IN_ORDER}}}"


def flat() -> DeviceMesh:
    theirs()
    return init_device_mesh("xla", (WORKERS,))


def square() -> DeviceMesh:
    theirs()
    return DeviceMesh("xla", torch.arange(WORKERS).reshape(2, 2))


def given(t: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    return distribute_tensor(t, mesh, placements)


@driven
def test_meshes_are_converted() -> None:
    x = theirs()
    convert = x.xs.api.convert_to_xla_mesh
    for mesh, shape in ((flat(), (4,)), (square(), (2, 2)), (DeviceMesh("xla", [[0, 1, 2, 3]]), (1, 4))):
        found = convert(mesh)
        assert isinstance(found, x.xs.Mesh)
        assert (found.mesh_shape, found.axis_names) == (shape, mesh.mesh_dim_names)
        assert list(found.device_ids) == mesh.mesh.flatten().tolist()
    named = convert(DeviceMesh("xla", list(range(4)), mesh_dim_names=("data_parallel",)))
    assert named.axis_names == ("data_parallel",)
    turned = DeviceMesh("xla", torch.tensor([[0, 2], [1, 3]]))
    assert convert(turned).get_logical_mesh().tolist() == [[0, 2], [1, 3]]
    with pytest.raises(AssertionError):
        convert(DeviceMesh("xla", list(range(WORKERS - 1))))


@driven
def test_a_tensor_is_wrapped_with_a_mesh_and_wrapped_anew_with_another() -> None:
    x = theirs()
    t = torch.randn(100, 50).to("xla")
    wrap = x.xs.xla_sharding.wrap_as_sharded_tensor
    one = wrap(t, mesh_shape=(WORKERS,), partition_spec=(0, None))
    assert isinstance(one, x.xs.XLAShardedTensor)
    assert (one.mesh_shape, one.partition_spec, one.placements) == ((4,), (0, None), (Shard(0),))
    other = wrap(one, mesh_shape=(2, 2), partition_spec=(0, 1))
    assert (other.mesh_shape, other.partition_spec) == ((2, 2), (0, 1))
    assert other.placements == (Shard(0), Shard(1))


@driven
def test_the_whole_tensor_is_the_drivers_local_one() -> None:
    x = theirs()
    whole = torch.randn(1000, 8, requires_grad=True)
    made = x.xs.XLAShardedTensor(whole, flat(), [Shard(0)])
    assert made.sharding_spec == ROWS
    assert made.requires_grad
    torch.autograd.backward(made.sum())
    local = made.to_local()
    assert local.requires_grad
    assert local.cpu().equal(whole)
    assert local.grad.cpu().equal(torch.ones(1000, 8))


@driven
def test_a_wrapped_tensor_may_be_a_leaf_of_its_own() -> None:
    x = theirs()
    t = torch.randn(16, 8).to("xla")
    leaf = x.xs.XLAShardedTensor(t, requires_grad=True)
    torch.autograd.backward((leaf * 2).sum())
    assert leaf.grad.cpu().equal(torch.full((16, 8), 2.0))
    assert not t.requires_grad
    cut = x.xs.XLAShardedTensor(t, flat(), [Shard(0)], requires_grad=True)
    torch.autograd.backward(cut.square().sum())
    assert said(cut) == said(cut.grad) == ROWS


@pytest.mark.parametrize(
    ("shape", "before", "mesh", "placements", "spec", "text"),
    [
        ((8,), (0,), (4,), (Shard(0),), (0,), "devices=[4]"),
        ((8, 16), (0, None), (4,), (Shard(0),), (0, None), "devices=[4,1]"),
        ((8, 16), (0, None), (4,), (Shard(1),), (None, 0), "devices=[1,4]"),
        ((8, 16), (0, None), (4,), (Replicate(),), (None, None), "replicated"),
        ((4, 8, 16), (0, None, None), (4,), (Shard(0),), (0, None, None), "devices=[4,1,1]"),
        ((8, 16), (0, None), (2, 2), (Replicate(), Shard(1)), (None, 1), "devices=[1,2,2]"),
        ((8, 16), (0, None), (2, 2), (Replicate(), Shard(0)), (1, None), "devices=[2,1,2]"),
        ((8, 16), (0, None), (2, 2), (Shard(1), Shard(1)), (None, (0, 1)), "devices=[1,4]"),
    ],
)
@driven
def test_tensors_are_redistributed(
    shape: Any, before: Any, mesh: Any, placements: Any, spec: Any, text: str
) -> None:
    x = theirs()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        whole = torch.randint(100, shape).to(dtype)
        marked = x.xs.mark_sharding(whole.to("xla"), mesh_of(*mesh), before)
        moved = marked.redistribute(mesh_of(*mesh), placements, async_op=dtype is torch.int32)
        assert (moved.partition_spec, moved.placements) == (spec, placements)
        assert moved.global_tensor is not marked.global_tensor
        x.torch_xla.sync()
        assert text in said(moved)
        assert moved.dtype == dtype
        assert moved.cpu().equal(whole)
