"""Operators on what rules may forget: no batch, batches that are broadcast, sums, and nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard
from torch.utils import _pytree as pytree

from spmd.engine.driver.operators import propagate
from spmd.engine.program.program import REPLICATED, Layout, MeshKey, Meta
from spmd.engine.worker.local_calls import InstructionError
from tests.unit.spmd.engine.recorded import Recorder, Value

aten: Any = torch.ops.aten
LINE: Final = MeshKey((0, 1), (2,))


def case(op: Any, where: list[Placement | None], *args: Any, **kwargs: Any) -> Any:
    """An operator, where each of its tensors lies (None: whole), and its arguments."""
    name = op.__name__.removesuffix(".default")
    return pytest.param(op, where, args, kwargs, id=f"{name}-{[str(each) for each in where]}")


_numbers: Final = torch.Generator().manual_seed(0)
"""A generator of the cases, so that their numbers do not depend on the modules imported before. With some
numbers a result in bfloat16 is rounded differently in parts."""


def r(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_numbers) + 0.5


def whole(*shape: int) -> Tensor:
    return torch.randint(1, 9, shape, generator=_numbers)


def cases() -> Iterator[Any]:
    first, last = Shard(0), Shard(1)
    where: Placement
    for op in (aten.channel_shuffle.default, aten.native_channel_shuffle.default):
        yield case(op, [first], r(1, 4, 2, 2), 2)
    yield case(aten.convolution.default, [last], r(1, 1, 6), r(1, 1, 3), None, [1], [0], [1], False, [0], 1)
    lower, upper = torch.tril(r(2, 3, 3)), torch.triu(r(3, 3))
    yield case(aten.linalg_solve_triangular.default, [first, first], lower, r(2, 3, 2), upper=False)
    yield case(aten.linalg_solve_triangular.default, [None, first], lower, r(1, 3, 2), upper=False)
    yield case(aten.linalg_solve_triangular.default, [first, None], upper, r(2, 3, 2), upper=True)
    factor, pivots, _ = aten.linalg_ldl_factor_ex.default(lower @ lower.mT)
    yield case(aten.linalg_ldl_solve.default, [first, first, first], factor, pivots, r(3, 3))
    for op in (aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.nansum.default):
        for where in (first, last):
            yield case(op, [where], r(5, 4), [], False)
            yield case(op, [where], r(5, 4), [], True)
    yield case(aten.var.correction, [first], r(5, 4), [])
    for op in (aten.fill.Scalar, aten.fill.Tensor):
        yield case(op, [Partial()], r(5, 4), 2.0 if op is aten.fill.Scalar else torch.tensor(2.0))
    yield case(aten.view.default, [first], r(4, 0), [4, 2, 0, 0])
    yield case(aten.view.default, [last], r(4, 0), [0, 7])
    for op in (aten.squeeze.dim, aten.squeeze_copy.dim):
        yield case(op, [last], r(3, 2), 1)
    for dim in (-2, 1):
        for where in (first, last):
            yield case(aten.cat.default, [None, where, where], [r(0), r(2, 4, 3), r(2, 4, 3)], dim)
            yield case(aten.cat.default, [where, first], [r(2, 4, 3), r(0)], dim)
    for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default):
        yield case(op, [last], r(3, 5), -1)
    yield case(aten.cat.default, [None, last], [r(0), r(3, 5)], -1)
    yield case(aten.select_backward.default, [last], r(3, 5), [3, 5, 2], -1, 0)
    yield case(aten.select_backward.default, [first], r(5, 2), [3, 5, 2], -3, 1)
    yield case(aten.slice_backward.default, [last], r(3, 3), [3, 5], -1, 1, 4, 1)
    for pad in ([1, 1], [0, 0, 1, 2]):
        for where in (Partial(), first, last):
            yield case(aten.constant_pad_nd.default, [where], r(3, 5), pad, 2.0)
    for where in (Partial(), first, last):
        yield case(aten.view.dtype, [where], r(3, 6), torch.int32)
        yield case(aten.view.dtype, [where], r(3, 6), torch.float64)
        yield case(aten.view.dtype, [where], r(3, 6), torch.int16)
    for op in (aten.mean.default, aten.mul.Scalar, aten.add.Scalar):
        yield case(op, [Partial("max")], r(3, 5), *([] if op is aten.mean.default else [-2.0]))
    many = torch.full((5, 16000), 1.5, dtype=torch.float16)
    yield case(aten.mean.default, [first], many)
    yield case(aten.mean.dim, [last], many, [1])
    yield case(aten.mse_loss.default, [first, first], many, -many)
    yield case(aten.linalg_vector_norm.default, [last], many)
    yield case(aten._foreach_norm.Scalar, [last], [many])
    channel = torch.ones(1, dtype=torch.float16)
    images = (torch.arange(160000.0) % 2).half().view(2, 1, 80000)
    yield case(aten._native_batch_norm_legit.no_stats, [first], images, channel, 0 * channel, True, 0.1, 1e-5)
    params, images = [r(3) for _ in range(4)], (torch.arange(240) % 7).bfloat16().view(5, 3, 4, 4)
    yield case(aten._native_batch_norm_legit_functional.default, [first], images, *params, True, 0.1, 1e-5)
    yield case(aten.linalg_vector_norm.default, [last], r(3, 1), -2.0)
    yield case(aten.index_select.default, [Partial(), first], r(), 0, torch.tensor([0]))
    for where in (first, last):
        yield case(aten._foreach_mul.List, [where], [r(5, 4)], [r(5, 1)])
        yield case(aten._foreach_addcdiv.Scalar, [where, first], [r(5, 4)], [r(5, 1)], [r(4)])
        yield case(aten._foreach_mm.default, [where, last], [r(4, 4)], [r(4, 4)])
        yield case(aten._foreach_powsum.Scalar, [where], [r(5, 4)])
    yield case(aten._foreach_add.List, [first], [r(4)], [r(3, 4)])
    yield case(aten.addmv.default, [first, None, first], r(5), r(5, 4), r(4), beta=0)
    for beta in (0.5, 2.7, 2):  # rounded for integers, also by a worker without a part of the inner dimension
        n = {"beta": beta, "alpha": 1.5}
        for op in (aten.addmm.default, aten.addmm_.default):
            yield case(op, [None, last, first], whole(2, 3), whole(2, 1), whole(1, 3), **n)
        for op in (aten.baddbmm.default, aten.baddbmm_.default):
            yield case(op, [None, Shard(2), last], whole(2, 2, 3), whole(2, 2, 1), whole(2, 1, 3), **n)
        for op in (aten.addbmm.default, aten.addbmm_.default):
            yield case(op, [None, Shard(2), last], whole(2, 3), whole(2, 2, 1), whole(2, 1, 3), **n)
            yield case(op, [None, first, first], whole(2, 3), whole(1, 2, 2), whole(1, 2, 3), **n)
        yield case(aten.addmv.default, [None, last, first], whole(2), whole(2, 1), whole(1), **n)
        yield case(aten.addmv_.default, [None, last, first], whole(2), whole(2, 1), whole(1), **n)
        yield case(
            aten._addmm_activation.default, [None, last, last], whole(5, 3), whole(5, 6), whole(6, 3), **n
        )
    for shape in ([0, 3], [4, 0]):  # reshaping nothing, DTensor looks for its rule forever
        yield case(aten.kron.default, [first, None], r(*shape), r(2, 2))
        yield case(aten._unsafe_view.default, [first], r(*shape), [0, 6])


@pytest.mark.parametrize(("op", "where", "args", "kwargs"), list(cases()))
def test_operators_on_parts(op: Any, where: list[Placement | None], args: Any, kwargs: Any) -> None:
    recorder, layouts = Recorder(), iter(where)
    placed: list[tuple[Value, Layout]] = []

    def place(whole: Tensor) -> Value:
        placement = next(layouts, None)
        layout = REPLICATED if placement is None else Layout(LINE, (placement,))
        value = recorder.input(whole, REPLICATED if layout.is_partial() else layout)
        placed.append((value, layout))
        return value

    def as_sum(value: Value) -> Value:
        return recorder.redistribute(value, next(each for known, each in placed if known is value))

    given = pytree.tree_map_only(Tensor, place, (args, kwargs))
    args, kwargs = pytree.tree_map_only(Value, as_sum, given)
    for result in pytree.tree_leaves(recorder.op(op, *args, **kwargs)):
        recorder.redistribute(result, REPLICATED)
    recorder.check(size=2)


@pytest.mark.parametrize("where", [Shard(0), Shard(1)])
@pytest.mark.parametrize("op", [aten.any.dim, aten.all.dim])
def test_truths_that_are_found_in_parts_count_once(op: Any, where: Placement) -> None:
    recorder = Recorder()
    x = recorder.input(torch.tensor([[1.0, -1, 2, 3], [1, 2, 3, 4]]), Layout(LINE, (where,)))
    found = recorder.op(op, recorder.op(aten.gt.Scalar, x, 0.0), -1, True)
    recorder.op(aten._to_copy.default, found, dtype=torch.float32)
    recorder.redistribute(recorder.op(aten.mul.Tensor, x, found), REPLICATED)
    recorder.check(size=2)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_gradients_of_convolutions_of_a_batch_stay_in_parts(spatial: int) -> None:
    grad, x, weight = (
        Meta(shape, (), torch.float32, layout)
        for shape, layout in (
            ((4, 6, *[5] * spatial), Layout(LINE, (Shard(0),))),
            ((4, 3, *[7] * spatial), Layout(LINE, (Shard(0),))),
            ((6, 3, *[3] * spatial), REPLICATED),
        )
    )
    each = [1] * spatial
    rest = ([6], each, [0] * spatial, each, False, [0] * spatial, 1, [True, True, True])
    found = propagate(aten.convolution_backward.default, (grad, x, weight, *rest), {})
    assert found.note is None
    assert [str(each.placements) for each in found.results] == ["(Shard(dim=0),)", *["(Partial(sum),)"] * 2]


@pytest.mark.parametrize("dim", [0, 1])
def test_indices_that_are_in_no_part_are_refused(dim: int) -> None:
    recorder = Recorder()
    table = recorder.input(r(6, 6), Layout(LINE, (Shard(dim),)))
    indices = recorder.input(torch.tensor([0, 5]))
    if dim == 0:
        found = recorder.op(aten.embedding.default, table, indices)
    else:
        chosen = recorder.op(aten.slice.Tensor, table, 0, 0, 2)
        found, _ = recorder.op(aten.nll_loss_forward.default, chosen, indices, None, 1, -100)
    indices.whole = torch.tensor([0, 6])
    with pytest.raises(InstructionError, match=r"out of (range|bounds)"):
        recorder.run([found])


def test_memory_like_that_of_a_sum_is_none() -> None:
    x = Meta((5, 4), (4, 1), torch.float32, Layout(LINE, (Partial(),)))
    assert propagate(aten.empty_like.default, (x,), {}).results == (REPLICATED,)
