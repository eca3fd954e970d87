"""Marks under XLA's names: what they say, and that values stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("shape", "mesh", "names", "spec", "text"),
    [
        ((1, 128), (1, 4), None, (0, 1), "{devices=[1,4]0,1,2,3}"),
        ((2, 4, 8, 16), (1, 1, 2, 2), None, (0, 1, 2, 3), "{devices=[1,1,2,2]0,1,2,3}"),
        ((8, 16), (1, 4), None, (1, 0), "{devices=[4,1]0,1,2,3}"),
        ((4, 8, 16), (2, 1, 2), None, (1, 2, 0), "{devices=[1,2,2]0,2,1,3}"),
        ((32, 4, 8, 16), (2, 1, 1, 2), None, (3, 1, 2, 0), "{devices=[2,1,1,2]0,2,1,3}"),
        ((4, 4), (2, 2), None, (0, None), "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"),
        ((4, 3, 4), (2, 1, 2), None, (1, None, 0), "{devices=[1,1,2,2]0,1,2,3 last_tile_dim_replicate}"),
        ((16,), (2, 2), None, ((0, 1),), "{devices=[4]0,1,2,3}"),
        ((16, 16), (1, 2, 2), "rbm", (("r", "b"), None), "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"),
        ((16, 16), (1, 2, 2), "rbm", (None, ("b", "m")), "{devices=[1,4]0,1,2,3}"),
        ((16, 16), (1, 2, 2), "rbm", (None, ("r", "m")), "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"),
        ((16, 16), (1, 2, 2), "rbm", (None, ("m", "b")), "{devices=[1,4]0,2,1,3}"),
        ((2, 2), (1, 2, 2, 1), "abcd", (("a", "b"), ("c", "d")), "{devices=[2,2]0,1,2,3}"),
        ((16, 16, 16), (2, 2), None, (None, 0, 1), "{devices=[1,2,2]0,1,2,3}"),
        ((16, 16), (2, 2, 1), None, (2, 1), "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"),
        ((8, 8), (1, 4), "xy", ("y", "x"), "{devices=[4,1]0,1,2,3}"),
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
def test_workers_in_another_order() -> None:
    x = theirs()
    t = torch.randn(10, 20).to("xla")
    x.xs.mark_sharding(t, x.xs.Mesh(list(reversed(range(WORKERS))), (1, WORKERS)), (0, 1))
    assert said(t) == "{devices=[1,4]3,2,1,0}"


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
def test_a_mark_over_a_replicated_one_is_allowed_and_another_cut_is_not() -> None:
    x = theirs()
    t, mesh = torch.randn(2, 4).to("xla"), mesh_of(1, WORKERS)
    x.xs.mark_sharding(t, mesh, (None, None))
    x.xs.mark_sharding(t, mesh, (0, 1))
    assert said(t) == f"{{devices=[1,4]{IN_ORDER}}}"
    with pytest.raises(RuntimeError, match="Existing annotation must be cleared first"):
        x.xs.mark_sharding(t, mesh, (1, 0))


@driven
def test_copies_are_cut_as_well() -> None:
    x = theirs()
    t = torch.randn(2, 4, 8, 16).to("xla")
    x.xs.mark_sharding(t, mesh_of(1, 1, 1, WORKERS), (0, 1, 2, 3))
    assert said(copy.deepcopy(t)) == said(t.clone()) == said(t) == f"{{devices=[1,1,1,4]{IN_ORDER}}}"


@driven
def test_steps_and_changes_in_place_keep_the_mark() -> None:
    x = theirs()
    t = torch.ones(2, 2).to("xla")
    x.xs.mark_sharding(t, mesh_of(1, WORKERS), (0, 1))
    text = said(t)
    x.xm.mark_step()
    assert said(t) == text
    t.add_(1)
    assert said(t) == text
    t += 1
    x.xm.mark_step()
    assert said(t) == text
    assert t.tolist() == [[3.0, 3.0], [3.0, 3.0]]


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
def test_what_is_computed_can_be_marked_and_goes_on() -> None:
    x = theirs()
    a, b = torch.randn(1, 128), torch.randn(1, 128)
    total = a.to("xla") + b.to("xla")
    marked = x.xs.mark_sharding(total, mesh_of(1, WORKERS), (0, 1))
    marked += 0
    assert said(marked) == f"{{devices=[1,4]{IN_ORDER}}}"
    assert marked.cpu().equal(a + b)


@driven
def test_products_of_partly_replicated_factors() -> None:
    x = theirs()
    a, b, c = torch.randn(16, 128), torch.randn(128, 256), torch.randn(16, 256)
    on = [each.to("xla") for each in (a, b, c)]
    x.xs.mark_sharding(on[0], mesh_of(2, 2), (0, None))
    x.xs.mark_sharding(on[1], mesh_of(2, 2), (None, 1))
    assert all("last_tile_dim_replicate" in said(each) for each in on[:2])
    torch.testing.assert_close((on[0] @ on[1] + on[2]).cpu(), a @ b + c, atol=1e-4, rtol=1e-4)


@driven
def test_integers_come_back_as_they_were() -> None:
    x = theirs()
    whole = torch.arange(64).reshape(8, 8)
    marked = x.xs.mark_sharding(whole.clone().to("xla"), mesh_of(WORKERS, 1), (0, 1))
    assert marked.cpu().equal(whole)


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
def test_specs_that_do_not_fit() -> None:
    x = theirs()
    t, mesh = torch.randn(4, 4).to("xla"), mesh_of(2, 2, names=("x", "y"))
    for spec, error, message in (
        ((0,), AssertionError, r"length \(1\) should be equal to the input rank \(2\)"),
        (("z", None), ValueError, "Axis name z is not defined in the given mesh"),
        ((1.5, None), ValueError, "is not supported in partition spec"),
        ((0, 2), AssertionError, "out of bound index"),
        ((0, 0), AssertionError, "should appear at most once"),
        ((("x", ("y",)), None), AssertionError, "cannot contain nested tuples"),
    ):
        with pytest.raises(error, match=message):
            x.xs.mark_sharding(t, mesh, spec)
    with pytest.raises(AssertionError, match="must match the global number of devices"):
        x.xs.Mesh([0, 1], (2,))


@driven
def test_meshes_that_cannot_be() -> None:
    x = theirs()
    for numbers, shape, names, message in (
        (range(4), (1, 4), ("data", "model", "extra"), "Number of axis names .* must match mesh dimensions"),
        (range(4), (1, 4), ("data", "data"), "Axis names must be unique"),
        (range(4), (2, 4), None, "Number of device IDs .* must match mesh size"),
        ([0] * 4, (1, 4), None, "Device IDs must be unique"),
        (range(5, 9), (1, 4), None, "Device IDs must be less than mesh size"),
        (range(2), (1, 2), None, "Number of device IDs .* must match the global number of devices"),
    ):
        with pytest.raises(AssertionError, match=message):
            x.xs.Mesh(list(numbers), shape, names)
    mesh = x.xs.Mesh(list(range(4)), (1, 4), ("data", "model"))
    assert (mesh.size(), list(mesh.device_ids), dict(mesh.shape())) == (
        4,
        [0, 1, 2, 3],
        {"data": 1, "model": 4},
    )
    assert x.xs.Mesh(list(range(4)), (2, 2)).axis_names is None


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
