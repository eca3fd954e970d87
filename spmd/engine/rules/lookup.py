"""Embeddings, and losses that look up their target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine.program.program import Meta
from spmd.engine.program.redistribution import all_reduce
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule

__all__ = ["check_rows"]

aten: Any = torch.ops.aten


@placement_rule("embedding")
def _embedding_rows(call: OperatorCall) -> list[Row]:
    whole, last = Replicate(), len(call["indices"].shape)
    rows = [Row((whole, Shard(dim)), (Shard(dim),)) for dim in range(last)]
    return [*rows, Row((Shard(1), whole), (Shard(last),)), Row((Shard(0), whole), (Partial(),))]


@local_rule("embedding")
def _embedding(site: Site) -> Local | None:
    """An embedding with a sharded vocabulary: zeros for the rows of other workers."""
    weight: Meta = site.call["weight"]
    if not site.groups(weight.layout, 0):
        return None
    begin, (count, _), every = site.offset(weight, 0), site.local_shape(weight), weight.shape[0]

    def embedding(rows: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_rows(indices, every)
        if not count:
            return rows.new_zeros((*indices.shape, rows.shape[1]))
        mine = indices - begin
        others = (mine < 0) | (mine >= count)
        found = aten.embedding(rows, mine.masked_fill_(others, 0))
        zeroed: Tensor = found.masked_fill_(others.unsqueeze(-1), 0)
        return zeroed

    return Local(embedding, site.args, site.kwargs)


def check_rows(indices: Tensor, count: int) -> None:
    """Raise the error of a kernel with all rows: with shards, an index of no row looks like one of another
    worker.
    """
    if ((indices < 0) | (indices >= count)).any():
        raise IndexError("index out of range in self")


@placement_rule("embedding_dense_backward")
def _embedding_backward_rows(call: OperatorCall) -> list[Row]:
    last = len(call["indices"].shape)
    if call["scale_grad_by_freq"]:
        return [Row((Shard(last), Replicate()), (Shard(1),))]
    rows = [Row((Shard(dim), Shard(dim)), (Partial(),)) for dim in range(last)]
    return [*rows, Row((Shard(last), Replicate()), (Shard(1),)), Row((Partial(), Replicate()), (Partial(),))]


# ---- negative log likelihood: samples may be sharded, and classes


_IGNORED: Final = -100
_NONE, _MEAN, _SUM = range(3)


def _likelihood_rows(call: OperatorCall) -> list[tuple[Placement, Placement, tuple[Placement, ...], bool]]:
    """Return the placements of scores, targets and class weights, and whether the samples are sharded."""
    shape = call["self"].shape
    if len(shape) == 1:
        return []
    given = isinstance(call["weight"], Meta)
    samples: list[tuple[Placement, Placement, tuple[Placement, ...], bool]] = [
        (Shard(dim), Shard(max(0, dim - 1)), (Replicate(),) * given, True)
        for dim in range(len(shape))
        if dim != 1
    ]
    return [*samples, (Shard(1), Replicate(), (Shard(0),) * given, False)]


@placement_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_rows(call: OperatorCall) -> list[Row]:
    each_alone = call["reduction"] == _NONE
    return [
        Row((scores, target, *weight), (target if each_alone and by_sample else Replicate(), Replicate()))
        for scores, target, weight, by_sample in _likelihood_rows(call)
    ]


@placement_rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward_rows(call: OperatorCall) -> list[Row]:
    each_alone = call["reduction"] == _NONE
    return [
        Row((target if each_alone else Replicate(), scores, target, *weight, Replicate()), (scores,))
        for scores, target, weight, by_sample in _likelihood_rows(call)
    ]


def _own_classes(site: Site) -> Callable[[Tensor, int], Tensor]:
    """Return targets as indices into a worker's own classes; those of other workers are ignored."""
    meta: Meta = site.call["self"]
    begin, count, classes = site.offset(meta, 1), site.local_shape(meta)[1], meta.shape[1]

    def own(target: Tensor, ignored: int) -> Tensor:
        wrong = ((target < 0) | (target >= classes)) & (target != ignored)
        if wrong.any():
            raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
        mine = target - begin
        return mine.masked_fill_((target == ignored) | (mine < 0) | (mine >= count), _IGNORED)

    return own


@local_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(site: Site) -> Local | None:
    """The total and its divisor, summed over all workers at once."""
    reduction, layout = site.call["reduction"], site.call["self"].layout
    of_classes = site.groups(layout, 1)
    groups = of_classes if reduction == _NONE else site.groups(layout)
    if not groups:
        return None
    own = _own_classes(site) if of_classes else None

    def nll(
        scores: Tensor, target: Tensor, weight: Tensor | None, _: int, ignored: int
    ) -> tuple[Tensor, Tensor]:
        if own is not None:
            target, ignored = own(target, ignored), _IGNORED
        if reduction == _NONE:
            sums = (
                site.call.op(scores, target, weight, _NONE, ignored)[0]
                if scores.shape[1]
                else scores.new_zeros(target.shape)
            )
        elif scores.numel():
            sums = torch.stack(site.call.op(scores, target, weight, _SUM, ignored))
        else:
            sums = scores.new_zeros(2)
        for group in groups:
            all_reduce(sums, "sum", group)
        if reduction == _NONE:
            return sums, scores.new_zeros(())
        total, divisor = sums.unbind()
        return (total / divisor if reduction == _MEAN else total.clone()), divisor.clone()

    return Local(nll, site.args, site.kwargs)


@local_rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(site: Site) -> Local | None:
    if not site.groups(site.call["self"].layout, 1):
        return None
    own = _own_classes(site)

    def backward(
        grad: Tensor,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignored: int,
        total: Tensor,
    ) -> Tensor:
        if not scores.numel():
            return torch.zeros_like(scores)
        mine = own(target, ignored)
        result: Tensor = site.call.op(grad, scores, mine, weight, reduction, _IGNORED, total)
        return result

    return Local(backward, site.args, site.kwargs)
