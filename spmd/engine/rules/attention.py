"""Attention: heads and samples are independent of each other; a sequence is whole."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from spmd.engine.program.program import Meta
from spmd.engine.rules.empty import zeros_instead
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule

__all__: list[str] = []

_OPERATORS: Final = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


@placement_rule(*_OPERATORS)
def _rows(call: OperatorCall) -> list[Row]:
    """Of ``(batch, heads, length, width)``."""
    backward = call.op.name().endswith("backward")
    mask = call["attn_mask"]
    tensors = call.tensors[: len(call.tensors) - isinstance(mask, Meta)]
    dims = [0, 1] if len({meta.shape[1] for meta in tensors}) == 1 else [0]
    rows = []
    for dim in dims:
        masks: tuple[Placement, ...] = ()
        if isinstance(mask, Meta):
            # (batch, heads, ...), (batch, 1, ...), (1, 1, ...), or (length, length)
            along = len(mask.shape) == 4 and mask.shape[dim] > 1
            masks = (Shard(dim) if along else Replicate(),)
        shards = (Shard(dim),)
        rows.append(Row(shards * len(tensors) + masks, shards * (3 if backward else 2)))
    return rows


@local_rule(*_OPERATORS)
def _dense_rows(site: Site) -> Local:
    """The kernel reads a row's numbers one after the other, whatever strides it is given."""
    nothing = zeros_instead(site, single=False)
    if nothing is not None:
        return site.runs(nothing)

    def dense(each: Any) -> Any:
        return each.contiguous() if isinstance(each, Tensor) and each.stride(-1) != 1 else each

    def attend(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return site.call.op(*map(dense, args), attn_mask=attn_mask, **kwargs)

    return site.runs(attend)
