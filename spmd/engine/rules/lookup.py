"""Embeddings, and losses that look up their target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from spmd.engine.program import Meta
from spmd.engine.redistribution import all_reduce
from spmd.engine.rules.local import Local, Site, local_rule
from spmd.engine.rules.placing import Call, Row, placement_rule

__all__: list[str] = []

aten: Any = torch.ops.aten


@placement_rule("embedding")
def _embedding_rows(call: Call) -> list[Row]:
    whole, last = Replicate(), len(call["indices"].shape)
    rows = [Row((whole, Shard(dim)), (Shard(dim),)) for dim in range(last)]
    return [*rows, Row((Shard(1), whole), (Shard(last),)), Row((Shard(0), whole), (Partial(),))]


@local_rule("embedding")
def _embedding(site: Site) -> Local | None:
    """Of a vocabulary that is sharded: zeros for what others have."""
    weight: Meta = site.call["weight"]
    if not site.groups(weight.layout, 0):
        return None
    begin, (count, _) = site.offset(weight, 0), site.local_shape(weight)

    def embedding(rows: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not count:
            return rows.new_zeros((*indices.shape, rows.shape[1]))
        mine = indices - begin
        others = (mine < 0) | (mine >= count)
        found = aten.embedding(rows, mine.masked_fill_(others, 0))
        zeroed: Tensor = found.masked_fill_(others.unsqueeze(-1), 0)
        return zeroed

    return Local(embedding, site.args, site.kwargs)


@placement_rule("embedding_dense_backward")
def _embedding_backward_rows(call: Call) -> list[Row]:
    last = len(call["indices"].shape)
    if call["scale_grad_by_freq"]:
        return [Row((Shard(last), Replicate()), (Shard(1),))]
    rows = [Row((Shard(dim), Shard(dim)), (Partial(),)) for dim in range(last)]
    return [*rows, Row((Shard(last), Replicate()), (Shard(1),)), Row((Partial(), Replicate()), (Partial(),))]


@placement_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_rows(call: Call) -> list[Row]:
    dims = [0] if len(call["self"].shape) == 2 else [0, 2, 3]
    if len(call["self"].shape) == 1:
        return []
    weights = (Replicate(),) if isinstance(call["weight"], Meta) else ()
    rows = []
    for dim in dims:
        target = Shard(max(0, dim - 1))
        result = target if call["reduction"] == 0 else Replicate()
        rows.append(Row((Shard(dim), target, *weights), (result, Replicate())))
    return rows


@local_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(site: Site) -> Local | None:
    """The total and what it is divided by, summed over all workers at once."""
    reduction = site.call["reduction"]
    groups = site.groups(site.call["self"].layout)
    if not groups or reduction == 0:
        return None

    def nll(
        scores: Tensor, target: Tensor, weight: Tensor | None, _: int, ignored: int
    ) -> tuple[Tensor, Tensor]:
        if target.numel():
            sums = torch.stack(site.call.op(scores, target, weight, 2, ignored))
        else:
            sums = scores.new_zeros(2)
        for group in groups:
            all_reduce(sums, "sum", group)
        total, divisor = sums.unbind()
        return (total / divisor if reduction == 1 else total.clone()), divisor.clone()

    return Local(nll, site.args, site.kwargs)


@placement_rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward_rows(call: Call) -> list[Row]:
    dims = [0] if len(call["self"].shape) == 2 else [0, 2, 3]
    if len(call["self"].shape) == 1:
        return []
    weights = (Replicate(),) if isinstance(call["weight"], Meta) else ()
    rows = []
    for dim in dims:
        target = Shard(max(0, dim - 1))
        grad = target if call["reduction"] == 0 else Replicate()
        rows.append(Row((grad, Shard(dim), target, *weights, Replicate()), (Shard(dim),)))
    return rows
