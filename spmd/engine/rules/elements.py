"""Elementwise operators: copies, fills, and losses of pairs of elements."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine.program.program import Meta
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule
from spmd.engine.rules.reductions import accumulated_in

__all__: list[str] = []

aten: Any = torch.ops.aten


def broadcast(shape: tuple[int, ...], into: tuple[int, ...], dim: int) -> Placement:
    """Return the placement of a tensor that is broadcast, if the other is sharded along ``dim``."""
    own = dim - len(into) + len(shape)
    return Shard(own) if own >= 0 and shape[own] == into[dim] and shape[own] > 1 else Replicate()


@placement_rule("copy", "fill.Tensor")
def _copy_rows(call: OperatorCall) -> list[Row]:
    target, source = call.tensors
    dims = range(len(target.shape))
    rows = [Row((Shard(dim), broadcast(source.shape, target.shape, dim)), (Shard(dim),)) for dim in dims]
    return [*rows, Row((Partial(), Replicate()), (Replicate(),))]


@placement_rule("fill.Scalar", "empty_like")
def _fill_rows(call: OperatorCall) -> list[Row]:
    """Rows of fills. A pending sum is complete afterwards: each worker has the number itself, and not
    a term.
    """
    rows = [Row((Shard(dim),), (Shard(dim),)) for dim in range(len(call.tensors[0].shape))]
    return [*rows, Row((Partial(),), (Replicate(),))]


@local_rule("copy")
def _copy(site: Site) -> Local:
    """Copy without reading what is overwritten."""

    def copy(target: Tensor, source: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(target).copy_(source)

    def over(target: Tensor, source: Tensor, *_: Any) -> Tensor:
        return target.copy_(source)

    return Local(copy, site.args, site.kwargs, over=over, written=(0,))


@placement_rule("unfold")
def _unfold_rows(call: OperatorCall) -> list[Row]:
    rank = len(call.tensors[0].shape)
    dims = [dim for dim in range(rank) if dim != call["dimension"] % rank]
    return [Row((Shard(dim),), (Shard(dim),)) for dim in dims]


@placement_rule("constant_pad_nd")
def _pad_rows(call: OperatorCall) -> list[Row]:
    """Rows along dimensions that keep their length. A sum is done first, since each term would be padded."""
    rank, pad = len(call.tensors[0].shape), call["pad"]
    padded = {rank - 1 - place // 2 for place, count in enumerate(pad) if count}
    return [Row((Shard(dim),), (Shard(dim),)) for dim in range(rank) if dim not in padded]


@placement_rule("gather")
def _gather_rows(call: OperatorCall) -> list[Row]:
    source, index = call.tensors
    if not source.shape:
        return []
    along = call["dim"] % len(source.shape)
    rows = [
        Row((Shard(dim), Shard(dim)), (Shard(dim),))
        for dim in range(len(source.shape))
        if dim != along and source.shape[dim] == index.shape[dim]
    ]
    return [*rows, Row((Replicate(), Shard(along)), (Shard(along),))]


@placement_rule("index_put")
def _index_put_rows(call: OperatorCall) -> list[Row]:
    """Rows along dimensions that are not indexed; along all for a mask and a single number."""
    target, indices, values = call["self"], call["indices"], call["values"]
    given = [each for each in indices if each is not None]
    rank = len(target.shape)
    if (
        len(given) == 1
        and given[0].shape == target.shape
        and given[0].dtype == torch.bool
        and not values.shape
    ):
        return [Row((Shard(dim), Shard(dim), Replicate()), (Shard(dim),)) for dim in range(rank)]
    if any(each.dtype in (torch.bool, torch.uint8) for each in given) or None in indices:
        return []
    # Indexed dimensions come first, so those behind them are those of the values, from the right.
    rows = []
    for dim in range(len(indices), rank):
        own = dim - rank + len(values.shape)
        placed: Placement = Shard(own) if own >= 0 and values.shape[own] > 1 else Replicate()
        if own < 0 or values.shape[own] in (1, target.shape[dim]):
            rows.append(Row((Shard(dim), *(Replicate(),) * len(given), placed), (Shard(dim),)))
    return rows


# ---- losses

_LOSSES: Final = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_LOSSES_BACKWARD: Final = (
    "mse_loss_backward",
    "smooth_l1_loss_backward",
    "huber_loss_backward",
    "soft_margin_loss_backward",
    "binary_cross_entropy_backward",
)
_NONE, _MEAN, _SUM = range(3)


@placement_rule(*_LOSSES, *_LOSSES_BACKWARD)
def _loss_rows(call: OperatorCall) -> list[Row]:
    shape = call["self"].shape
    if call["target"].shape != shape:
        return []
    backward = call.op.name() in {f"aten::{name}" for name in _LOSSES_BACKWARD}
    rows = []
    for dim in range(len(shape)):
        if shape[dim] == 1:  # each worker would have all of it, and add it
            continue
        inputs = tuple(broadcast(meta.shape, shape, dim) for meta in call.tensors)
        if backward and call["reduction"] != _NONE:
            inputs = (Replicate(), *inputs[1:])
        elementwise = backward or call["reduction"] == _NONE
        rows.append(Row(inputs, (Shard(dim) if elementwise else Partial(),)))
    return rows


@local_rule(*_LOSSES)
def _loss(site: Site) -> Local | None:
    """A loss. A mean is a sum, divided by the number of elements of the whole."""
    meta: Meta = site.call["self"]
    (result,) = site.results
    if site.call["reduction"] != _MEAN or not site.groups(meta.layout) or result is None:
        return None
    count, dtype = math.prod(meta.shape), result.dtype
    wide = accumulated_in(dtype)

    def mean(*args: Any, **kwargs: Any) -> Tensor:
        losses: Tensor = site.call.op(*args, **kwargs)
        return losses.sum(dtype=wide).div_(count).to(dtype)

    return site.runs(mean, reduction=_SUM if wide is dtype else _NONE)


@local_rule(*_LOSSES_BACKWARD)
def _loss_backward(site: Site) -> Local | None:
    meta: Meta = site.call["self"]
    if site.call["reduction"] != _MEAN or not site.groups(meta.layout):
        return None
    count = math.prod(meta.shape)

    def backward(grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        gradient: Tensor = site.call.op(grad / count, *args, **kwargs)
        return gradient

    return site.runs(backward, reduction=_SUM)
