"""Marks under XLA's names: what they say, and that values stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


@driven
def test_the_type_follows_the_spec() -> None:
    x = theirs()
    kinds, t, mesh = x.xs.ShardingType, torch.randn(10, 20).to("xla"), mesh_of(2, 2)
    assert x.torch_xla._XLAC._get_xla_sharding_type(t) is None
    for spec, kind in (
        ((0, 1), kinds.TILED),
        ((None, None), kinds.REPLICATED),
        ((None, 1), kinds.PARTIAL),
    ):
        x.xs.clear_sharding(t)
        assert said(t) == ""
        assert x.xs.mark_sharding(t, mesh, spec).sharding_type == kind
        assert x.torch_xla._XLAC._get_xla_sharding_type(t) == kind


@driven
def test_what_nobody_marks_is_replicated_once_it_is_computed() -> None:
    x = theirs()
    a, b = torch.randn(4, 4).to("xla"), torch.randn(4, 4).to("xla")
    product = a @ b
    assert said(product) == said(a) == ""
    x.xm.mark_step()
    assert said(product) == "{replicated}"


@pytest.mark.parametrize("step_first", [False, True])
@driven
def test_what_was_made_on_the_device_may_be_marked_after_it_was_used(step_first: bool) -> None:
    x = theirs()
    t = torch.randn(8, 128, device=x.xm.xla_device())
    result = t * 5
    if step_first:
        x.xm.mark_step()
    x.xs.mark_sharding(t, mesh_of(1, WORKERS), (1, 0))
    assert said(t) == f"{{devices=[4,1]{IN_ORDER}}}"
    x.xm.mark_step()
    assert torch.allclose(result.cpu(), t.cpu() * 5)


@driven
def test_a_global_mesh_is_the_object_that_was_set() -> None:
    x = theirs()
    mesh = mesh_of(1, WORKERS)
    x.xs.set_global_mesh(mesh)
    assert x.xs.get_global_mesh() is mesh
    flat = x.xs.get_1d_mesh("data")
    assert (flat.mesh_shape, flat.axis_names) == ((x.xr.global_runtime_device_count(),), ("data",))
    assert x.xs.get_1d_mesh().mesh_shape == flat.mesh_shape
    assert mesh.get_logical_mesh().shape == x.xs.HybridMesh(ici_mesh_shape=(1, WORKERS)).mesh_shape


@driven
def test_marks_are_operators_too() -> None:
    x = theirs()
    whole = torch.randn(8, 4)
    t = whole.to("xla")
    operators: Any = torch.ops.xla
    operators.dynamo_mark_sharding(t, list(range(WORKERS)), [2, 2], "('x', 'y')", "('y', None)")
    assert said(t) == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    leaf = whole.to("xla").requires_grad_()
    marked = operators.aot_mark_sharding(leaf, str(mesh_of(WORKERS)), "(0, None)")
    torch.autograd.backward((marked * 2).sum())
    assert leaf.grad is not None
    assert said(marked) == said(leaf.grad) == f"{{devices=[4,1]{IN_ORDER}}}"
    assert said(leaf) == ""
    assert x.xs.wrap_if_sharded(leaf) is leaf
