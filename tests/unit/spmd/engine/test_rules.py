"""Every operator on parts gives the parts of what it gives on the whole, wherever its tensors lie."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from spmd.engine.program.program import REPLICATED, Layout, MeshKey
from tests.unit.spmd.engine.recorded import Recorder, Value

aten: Any = torch.ops.aten
LINE: Final = MeshKey((0, 1), (2,))
SQUARE: Final = MeshKey((2, 0, 3, 1), (2, 2))
ROW: Final = MeshKey((0, 1, 2, 3), (4,))

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


def case(op: Any, *args: Any, **kwargs: Any) -> Case:
    return op, args, kwargs


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


def upto(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, shape)


def pointwise(rows: int) -> Iterator[Case]:
    x, y = r(rows, 3), r(rows, 3)
    for op in (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.copy.default):
        yield case(op, x, y)
    for op in (aten.relu, aten.gelu, aten.neg, aten.clone, aten.detach, aten.t, aten.ones_like, aten.isnan):
        yield case(op.default, x)
    yield case(aten.where.self, x > 0, x, y)
    yield case(aten.masked_fill.Scalar, x, y > 0, 3.0)
    yield case(aten.fill.Tensor, x, torch.tensor(2.0))
    yield case(aten.addcmul.default, x, y, y, value=0.5)
    yield case(aten._to_copy.default, x, dtype=torch.float64)
    yield case(aten.add.Tensor, upto(9, rows, 3), upto(9, rows, 1))


def reductions(rows: int) -> Iterator[Case]:
    x = r(rows, 3)
    for op in (aten.sum, aten.mean, aten.argmax, aten.linalg_vector_norm):
        yield case(op.default, x)
    for dim, keep in itertools.product((0, 1), (False, True)):
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default):
            yield case(op, x, [dim], keep)
        yield case(aten.argmin.default, x, dim, keep)
        yield case(aten.linalg_vector_norm.default, x, 3.0, [dim], keep)
        yield case(aten.linalg_vector_norm.default, x, float("inf"), [dim], keep)
    for dim in (0, 1):
        yield case(aten.max.dim, x, dim)
        yield case(aten.topk.default, x, 2, dim)
        yield case(aten.sort.default, x, dim)
        yield case(aten.cumsum.default, x, dim)
        yield case(aten.var.correction, x, [dim])
        yield case(aten._softmax.default, x, dim, False)
    yield case(aten.sum.default, upto(99, rows, 3))


def shapes(rows: int) -> Iterator[Case]:
    x, y = r(rows, 4), r(rows, 4)
    for dim in (0, 1):
        yield case(aten.select.int, x, dim, 1)
        yield case(aten.slice.Tensor, x, dim, 1, 3)
        yield case(aten.cat.default, [x, y], dim)
        yield case(aten.stack.default, [x, y], dim)
        yield case(aten.split.Tensor, x, 2, dim)
        yield case(aten.unbind.int, x, dim)
        yield case(aten.flip.default, x, [dim])
        yield case(aten.unsqueeze.default, x, dim)
        yield case(aten.slice_backward.default, x[:2] if dim == 0 else x[:, :2], [rows, 4], dim, 1, 3, 1)
    yield case(aten.view.default, x, [-1])
    yield case(aten.view.default, r(rows, 2, 4), [rows * 2, 4])
    yield case(aten.view.default, r(3, rows, 4), [3, -1])
    yield case(aten.view.default, r(3, rows, 4), [3 * rows, 4])
    yield case(aten.view.default, r(3, rows * 2, 3), [3, rows, 1, 2, 3])
    yield case(aten.view.default, r(3, rows, 1, 4), [3 * rows * 4])
    yield case(aten.view.default, r(rows, 2, 4), [rows, 2, 2, 2])
    yield case(aten._unsafe_view.default, r(rows * 2, 4), [rows, 2, 4])
    yield case(aten.view.default, r(2, rows, 4).transpose(0, 1), [rows, 2, 2, 2])
    yield case(aten.expand.default, x, [3, rows, 4])
    yield case(aten.squeeze.default, r(1, rows, 1))
    yield case(aten.squeeze.dim, r(rows, 1, 2), 1)
    yield case(aten.as_strided.default, x, [2, 2], [1, 2], 1)
    yield case(aten.constant_pad_nd.default, x, [1, 1], 0.0)
    yield case(aten.new_zeros.default, x, [rows, 4])
    yield case(aten.triu.default, x)
    yield case(aten.unfold.default, x, 0, 2, 1)


def indexed(rows: int) -> Iterator[Case]:
    x, few = r(rows, 3), torch.tensor([2, 0])
    yield case(aten.index.Tensor, x, [few])
    yield case(aten.index.Tensor, x, [None, few])
    yield case(aten.index_put.default, x, [few], r(2, 3))
    yield case(aten.index_put.default, x, [few], r(2, 3), True)
    yield case(aten.index_put.default, x, [x > 0], torch.tensor(1.0))
    yield case(aten.embedding.default, x, upto(rows, 4, 6))
    yield case(aten.embedding_dense_backward.default, r(4, 6, 3), upto(rows, 4, 6), rows, -1, False)
    for dim in (0, 1):
        yield case(aten.index_select.default, x, dim, few)
        yield case(aten.gather.default, x, dim, upto(3, 2, 3))
        yield case(aten.scatter_add.default, x, dim, upto(3, 2, 3), r(2, 3))
    yield case(aten.nonzero.default, x)


def products(rows: int) -> Iterator[Case]:
    x = r(rows, 4)
    yield case(aten.mm.default, x, r(4, 6))
    yield case(aten.addmm.default, r(6), x, r(4, 6))
    yield case(aten.addmm.default, r(rows, 6), x, r(4, 6))
    yield case(aten.bmm.default, r(rows, 6, 4), r(rows, 4, 3))
    yield case(aten.baddbmm.default, r(rows, 6, 3), r(rows, 6, 4), r(rows, 4, 3))
    q, k, v, grad = (r(rows, 4, 6, 8) for _ in range(4))
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = attention.default(q, k, v, 0.0, True)
    yield case(attention.default, q, k, v, 0.0, True)
    yield case(attention.default, q, k, v, attn_mask=r(6, 6))
    yield case(attention.default, q, k, v, attn_mask=r(rows, 1, 6, 6))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    yield case(backward, grad, q, k, v, out, logsumexp, 0.0, True)
    few_k, few_v = k[:, :2], v[:, :2]  # each of their heads serves two
    out, logsumexp = attention.default(q, few_k, few_v)
    yield case(attention.default, q, few_k, few_v)
    yield case(backward, grad, q, few_k, few_v, out, logsumexp, 0.0, False)


def losses(rows: int) -> Iterator[Case]:
    x, y, target = r(rows, 3), r(rows, 3), upto(3, rows)
    one, scores = torch.tensor(1.0), x.log_softmax(1)
    for reduction in range(3):
        for loss in (aten.mse_loss, aten.huber_loss, aten.binary_cross_entropy_with_logits):
            yield case(loss.default, r(rows, 1), r(rows, 1).sigmoid(), reduction=reduction)
        yield case(aten.nll_loss_forward.default, scores, target, None, reduction, 0)
        yield case(aten.mse_loss.default, x, y, reduction)
        yield case(aten.binary_cross_entropy_with_logits.default, x, y.sigmoid(), None, None, reduction)
    yield case(aten.nll_loss_forward.default, scores, target, r(3).abs(), 1, -100)
    args = (scores, target, r(3).abs(), 0, -100, torch.tensor(0.0))
    yield case(aten.nll_loss_backward.default, r(rows), *args)
    yield case(aten._softmax_backward_data.default, y, x.softmax(1), 1, torch.float32)
    yield case(aten.nll_loss_backward.default, one, scores, target, None, 1, -100, torch.tensor(float(rows)))
    yield case(aten.mse_loss_backward.default, one, x, y, 1)
    yield case(aten.huber_loss_backward.default, x, x, y, 0, 1.0)
    yield case(aten._log_softmax.default, x, 1, False)
    yield case(aten._log_softmax_backward_data.default, y, scores, 1, torch.float32)


def norms(rows: int) -> Iterator[Case]:
    args: tuple[Any, ...]
    x, weight, bias, mean, var = r(rows, 4, 3, 3), r(4), r(4), r(4), r(4).abs() + 0.1
    for training in (True, False):
        args = (x, weight, bias, mean, var, training, 0.1, 1e-5)
        yield case(aten._native_batch_norm_legit_functional.default, *args)
        _, saved, inverse, _, _ = aten._native_batch_norm_legit_functional.default(*args)
        for mask in ([True] * 3, [False, True, True]):
            args = (r(rows, 4, 3, 3), x, weight, mean, var, saved, inverse, training, 1e-5, mask)
            yield case(aten.native_batch_norm_backward.default, *args)
    yield case(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
    yield case(aten.native_batch_norm.default, x, weight, bias, mean, var, False, 0.1, 1e-5)
    yield case(aten.native_group_norm.default, x, weight, bias, rows, 4, 9, 2, 1e-5)
    _, saved, inverse = aten.native_group_norm.default(x, weight, bias, rows, 4, 9, 2, 1e-5)
    args = (r(rows, 4, 3, 3), x, saved, inverse, weight, rows, 4, 9, 2, [True] * 3)
    yield case(aten.native_group_norm_backward.default, *args)
    y = r(rows, 2, 4)
    yield case(aten.native_layer_norm.default, y, [4], weight, bias, 1e-5)
    _, saved, inverse = aten.native_layer_norm.default(y, [4], weight, bias, 1e-5)
    args = (r(rows, 2, 4), y, [4], saved, inverse, weight, bias, [True] * 3)
    yield case(aten.native_layer_norm_backward.default, *args)


def bags(rows: int) -> Iterator[Case]:
    table, indices = r(rows + 2, 4), upto(rows + 2, 3 * rows)
    even, ragged = torch.arange(0, 3 * rows, 3), torch.tensor([0, 0, 1, rows + 1, 3 * rows])
    for mode in (0, 1):
        for offsets, last, padding in ((even, False, -1), (ragged, False, 2), (ragged, True, -1)):
            given = (table, indices, offsets, False, mode, False, None, last, padding)
            yield case(aten._embedding_bag.default, *given)
            _, bag_of, counts, most = aten._embedding_bag.default(*given)
            grad = r(len(offsets) - last, 4)
            rest = (rows + 2, False, mode, False, None, padding)
            yield case(
                aten._embedding_bag_backward.default, grad, indices, offsets, bag_of, counts, most, *rest
            )
    yield case(aten._embedding_bag.default, table, indices, even, False, 2)
    yield case(aten._embedding_bag.default, table, indices, even, False, 0, False, r(3 * rows))


def convolutions(rows: int) -> Iterator[Case]:
    args: tuple[Any, ...]
    x, weight, bias = r(rows, 4, 6, 6), r(8, 4, 3, 3), r(8)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield case(aten.convolution.default, x, weight, bias, *rest)
    yield case(aten.convolution.default, x, r(4, 2, 3, 3), None, *rest[:3], True, [0, 0], 2)
    grad = r(rows, 8, 6, 6)
    yield case(aten.convolution_backward.default, grad, x, weight, [8], *rest, [True] * 3)
    yield case(aten.convolution_backward.default, grad, x, weight, None, *rest, [False, True, False])
    yield case(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
    _, found = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
    args = (r(rows, 4, 3, 3), x, [2, 2], [2, 2], [0, 0], [1, 1], False, found)
    yield case(aten.max_pool2d_with_indices_backward.default, *args)
    yield case(aten.avg_pool2d.default, x, [2, 2])
    args = (r(rows, 4, 3, 3), x, [2, 2], [2, 2], [0, 0], False, True, None)
    yield case(aten.avg_pool2d_backward.default, *args)
    yield case(aten._adaptive_avg_pool2d_backward.default, r(rows, 4, 2, 2), x)
    yield case(aten.upsample_nearest2d_backward.default, r(rows, 4, 12, 12), [12, 12], [rows, 4, 6, 6])


def draws(rows: int) -> Iterator[Case]:
    x = r(rows, 4)
    yield case(aten.native_dropout.default, x, 0.5, True)
    yield case(aten.native_dropout.default, x.t(), 0.5, True)
    yield case(aten.uniform.default, x)
    yield case(aten.normal_functional.default, x.t())
    yield case(aten.bernoulli.p, x, 0.3)
    yield case(aten.bernoulli.default, x.sigmoid())
    yield case(aten.rand_like.default, x)
    yield case(aten.randint_like.low_dtype, x, 3, 9)
    yield case(aten.multinomial.default, x.abs(), 2)
    yield case(aten.randperm.default, 7)
    yield case(aten.randn.default, [3, 4])


def lists(rows: int) -> Iterator[Case]:
    x, y = r(rows, 4), r(rows, 4)
    one = torch.tensor(1.0)
    yield case(aten._foreach_add.List, [x, y, r(3)], [y, x, r(3)], alpha=0.1)
    yield case(aten._foreach_mul.Tensor, [x, y], torch.tensor(0.5))
    yield case(aten._foreach_addcdiv.ScalarList, [x], [y], [y.abs() + 1], [0.1])
    yield case(aten._foreach_norm.Scalar, [x, y, r(7)])
    yield case(aten._foreach_norm.Scalar, [x, y], float("inf"))
    yield case(aten._foreach_norm.Scalar, [x, r(1)], float("inf"))  # not all workers have a part
    zeros = [torch.zeros_like(x)] * 2
    settings = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
    yield case(aten._fused_adam.default, [x, y], [y, x], zeros, zeros, [], [one, one], **settings, **adam)
    sgd = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    yield case(aten._fused_sgd.default, [x, y], [y, x], zeros, **settings, **sgd)


KINDS: Final[list[Callable[[int], Iterator[Case]]]] = [
    pointwise,
    reductions,
    shapes,
    indexed,
    products,
    losses,
    norms,
    bags,
    convolutions,
    draws,
    lists,
]


def layouts(whole: Tensor, mesh: MeshKey) -> list[Layout]:
    """All in which the parts are shards, or sums if these can be."""
    kinds = [Replicate(), *(Shard(dim) for dim in range(whole.dim()))]
    if whole.is_floating_point():
        kinds.append(Partial())
    return [Layout.of(mesh, each) for each in itertools.product(kinds, repeat=len(mesh.shape))]


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        (LINE, 5),
        (SQUARE, 8),
        *(
            pytest.param(mesh, rows, marks=pytest.mark.nightly)
            for mesh, rows in ((LINE, 8), (SQUARE, 5), (ROW, 5), (LINE, 3), (SQUARE, 3), (ROW, 3))
        ),  # of four workers, the last has an empty part
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_operators_on_parts(kind: Callable[[int], Iterator[Case]], mesh: MeshKey, rows: int) -> None:
    torch.manual_seed(0)
    choice = random.Random(rows)
    recorder = Recorder()

    def place(whole: Tensor) -> Any:
        if not whole.dim():
            return recorder.input(whole)
        layout = choice.choice(layouts(whole, mesh))
        if not layout.is_partial():
            return recorder.input(whole, layout)
        value = recorder.input(whole)
        sums[value.index] = layout
        return value

    def as_sum(value: Value) -> Value:
        return recorder.redistribute(value, sums.get(value.index, value.meta.layout))

    sums: dict[int, Layout] = {}
    cases = [(op, *pytree.tree_map_only(Tensor, place, (args, kwargs))) for op, args, kwargs in kind(rows)]
    cases = [(op, *pytree.tree_map_only(Value, as_sum, (args, kwargs))) for op, args, kwargs in cases]
    torch.manual_seed(0)
    for op, args, kwargs in cases:
        for result in pytree.tree_leaves(recorder.op(op, *args, **kwargs)):
            if result is not None:
                recorder.redistribute(result, REPLICATED)
    recorder.check(size=len(mesh.devices))


def few(op: Any, dims: list[int | None], *args: Any, **kwargs: Any) -> Any:
    """An operator, where each tensor is cut, and its arguments."""
    return pytest.param(op, dims, args, kwargs, id=f"{op.__name__}-{dims}")


def _few() -> Iterator[Any]:
    x, grad, weight, stats = r(2, 3, 4, 4), r(2, 2, 2, 2), r(2, 3, 3, 3), (r(3), r(3).abs(), r(3), r(3).abs())
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for dim in (0, 1):
        cut = [dim, None, None, None, None]
        yield few(aten._native_batch_norm_legit_functional, cut, x, *stats, True, 0.1, 1e-5)
        for training in (True, False):
            args = (x, x, *stats[:3], *stats[2:], training, 1e-5, [True] * 3)
            yield few(aten.native_batch_norm_backward, [dim, *cut], *args)
        yield few(aten.max_pool2d_with_indices, [dim], x, [2, 2])
        yield few(aten.upsample_nearest2d, [dim], x, [8, 8])
    yield few(aten.convolution, [None, 0, 0], x, weight, r(2), *rest)
    yield few(aten.convolution, [0, None, None], x, weight, r(2), *rest)
    yield few(aten.convolution_backward, [1, None, 0], grad, x, weight, [2], *rest, [True] * 3)
    yield few(aten.convolution_backward, [0, 0, None], grad, x, weight, [2], *rest, [True] * 3)
    yield few(aten.convolution_backward, [None, 1, 1], grad, x, weight, [2], *rest, [True] * 3)
    q = r(1, 2, 4, 8)
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = attention.default(q, q, q)
    for dim in (0, 1):
        yield few(attention, [dim] * 3, q, q, q)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        yield few(backward, [dim] * 6, q, q, q, q, out, logsumexp, 0.0, False)


@pytest.mark.parametrize(("op", "dims", "args", "kwargs"), list(_few()))
def test_workers_without_a_row_or_channel_run_no_kernel(
    op: Any, dims: list[int | None], args: Any, kwargs: Any
) -> None:
    recorder, cut = Recorder(), iter(dims)

    def place(whole: Tensor) -> Value:
        dim = next(cut, None)
        return recorder.input(whole, REPLICATED if dim is None else Layout.of(ROW, (Shard(dim),)))

    args, kwargs = pytree.tree_map_only(Tensor, place, (args, kwargs))
    for result in pytree.tree_leaves(recorder.op(op.default, *args, **kwargs)):
        recorder.redistribute(result, REPLICATED)
    recorder.check(size=4)


@pytest.mark.parametrize("mesh", [LINE, SQUARE])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 2)])
def test_redistribution_from_any_layout_to_any(mesh: MeshKey, shape: tuple[int, int]) -> None:
    kinds = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max")]
    known = list(itertools.product(kinds, repeat=len(mesh.shape)))
    pairs = list(itertools.product(known, known))
    recorder = Recorder()
    whole = recorder.input(torch.randn(shape))
    for source, target in random.Random(0).sample(pairs, min(len(pairs), 120)):
        if len({each.reduce_op for each in (*source, *target) if isinstance(each, Partial)}) < 2:
            laid_out = recorder.redistribute(whole, Layout.of(mesh, source))
            moved = recorder.redistribute(laid_out, Layout.of(mesh, target))
            recorder.redistribute(moved, REPLICATED)
    recorder.check(size=len(mesh.devices))
