"""Marks under XLA's names: what they say, and that values stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("shape", "mesh", "names", "spec", "text"),
    [
        ((32, 4, 8, 16), (2, 1, 1, 2), None, (3, 1, 2, 0), "{devices=[2,1,1,2]0,2,1,3}"),
        ((4, 3, 4), (2, 1, 2), None, (1, None, 0), "{devices=[1,1,2,2]0,1,2,3 last_tile_dim_replicate}"),
        ((16, 16), (1, 2, 2), "rbm", (None, ("r", "m")), "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"),
        ((7, 5), (2, 2), "xy", (("y", "x"), None), "{devices=[4,1]0,2,1,3}"),
        ((), (1, 4), None, (), "{replicated}"),
    ],
)
@driven
def test_a_spec_says_where_a_tensor_is_and_keeps_its_value(
    shape: Any, mesh: Any, names: Any, spec: Any, text: str
) -> None:
    x = theirs()
    whole = torch.randn(shape)
    t = whole.to(x.xm.xla_device())
    marked = x.xs.mark_sharding(t, mesh_of(*mesh, names=names and tuple(names)), spec)
    assert isinstance(marked, x.xs.XLAShardedTensor)
    assert said(t) == text == x.xs.debugging.construct_v1_sharding_str(t)
    assert marked.sharding_spec == text
    assert (t + whole.to("xla")).cpu().equal(whole + whole)
    assert t.cpu().equal(whole)


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


@driven
def test_of_several_results_one_is_marked() -> None:
    x = theirs()
    values, indices = torch.max(torch.randn(8, 8).to("xla"), 1)
    x.xs.mark_sharding(values, mesh_of(WORKERS), (0,))
    assert said(values) == f"{{devices=[4]{IN_ORDER}}}"
    assert said(indices) == ""


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
def test_another_cut_is_annotated_over_the_first() -> None:
    x = theirs()
    whole = torch.randn(2, 4, 8, 8)
    t = whole.to("xla")
    x.xs.mark_sharding(t, mesh_of(1, 1, 2, 2), (0, 1, 2, 3))
    with pytest.raises(RuntimeError, match="must be cleared first"):
        x.xs.mark_sharding(t, mesh_of(1, 1, 1, WORKERS), (0, 1, 2, 3))
    assert said(t) == f"{{devices=[1,1,2,2]{IN_ORDER}}}"
    x.xs.annotate_custom_sharding(t, mesh_of(1, 1, 1, WORKERS), (0, 1, 2, 3))
    x.xm.mark_step()
    assert said(t) == f"{{devices=[1,1,1,4]{IN_ORDER}}}"
    assert t.cpu().equal(whole)


@driven
def test_complex_numbers_are_computed_and_replicated() -> None:
    theirs()
    size, angle = torch.ones(6, 4), torch.outer(torch.arange(6.0), torch.arange(4.0))
    polar = torch.polar(size.to("xla"), angle.to("xla"))
    theirs().torch_xla.sync()
    assert said(polar) == "{replicated}"
    torch.testing.assert_close(polar.cpu(), torch.polar(size, angle))


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
