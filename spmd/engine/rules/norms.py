"""Batch norm of a sharded batch: each worker computes the statistics of its shard, and they are combined.

The statistics are those of the whole batch, as on one device: means and sums of squares of the shards are
gathered and combined by Chan's formula, so no worker gets the rows of another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spmd.engine.program.redistribution import all_gather, all_reduce
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, pattern, placement_rule
from spmd.engine.rules.reductions import accumulated_in

__all__: list[str] = []

aten: Any = torch.ops.aten


@placement_rule(
    "native_batch_norm",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit.no_stats",
)
def _rows(call: OperatorCall) -> list[Row]:
    results = len(call.op._schema.returns) - 3
    if call.op.name().endswith("no_stats"):
        return pattern(call, "0rr->0rr|100->100")
    # Without training the saved statistics are empty, and so whole.
    saved = "00" if _trains(call) else "rr"
    return pattern(call, f"0rrrr->0rr{'r' * results}|10000->1{saved}{'0' * results}")


@placement_rule("native_batch_norm_backward")
def _backward_rows(call: OperatorCall) -> list[Row]:
    # The sums over the batch are needed for the gradient of the input, so those of weight and bias are whole.
    sums = "rr" if call["train"] else "pp"
    return pattern(call, f"00rrrrr->0{sums}|1100000->100")


def _trains(call: OperatorCall) -> bool:
    name = call.op.name()
    if name.endswith("no_training"):
        return False
    return bool(name.endswith("no_stats") or call["training"])


def _statistics(local: Tensor, dtype: torch.dtype, groups: list[Any]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel over all workers' shards, combined in at least
    32 bits.
    """
    channels, wide = local.shape[1], accumulated_in(local.dtype)
    mean, variance = (local.new_zeros(channels, dtype=wide) for _ in range(2))
    if local.numel():
        mean, variance = aten.batch_norm_update_stats(local, mean, variance, 0.0)
    mine = torch.stack((mean, variance, torch.full_like(mean, local.numel() // max(channels, 1))))
    for group in groups:
        parts = mine.new_empty((group.size(), *mine.shape))
        all_gather(mine, list(parts), group)
        means, variances, counts = parts.unbind(1)
        total = counts.sum(0)
        weights = counts / total.clamp(min=1)
        mean = (weights * means).sum(0)
        variance = (weights * (variances + (means - mean).square())).sum(0)
        mine = torch.stack((mean, variance, total))
    return mean.to(dtype), variance.to(dtype)


@local_rule("native_batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats")
def _batch_norm(site: Site) -> Local | None:
    meta = site.call["input"]
    groups = site.groups(meta.layout, *(dim for dim in range(len(meta.shape)) if dim != 1))
    if not groups or not _trains(site.call):
        return None
    count = math.prod(meta.shape) // max(meta.shape[1], 1)
    keeps = site.call.op.name().endswith("functional")
    has_running = not site.call.op.name().endswith("no_stats")
    saved = site.results[1]
    dtype = meta.dtype if saved is None else saved.dtype

    def batch_norm(
        local: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        running_mean, running_var = rest[:2] if has_running else (None, None)
        momentum, eps = rest[-2:]
        mean, variance = _statistics(local, dtype, groups)
        out = aten.native_batch_norm(local, weight, bias, mean, variance, False, 0.0, eps)[0]
        inverse = (variance + eps).rsqrt_()
        if running_mean is None or running_var is None:
            return out, mean, inverse
        unbiased = variance * (count / max(count - 1, 1))
        new_mean = torch.lerp(running_mean, mean, momentum)
        new_var = torch.lerp(running_var, unbiased, momentum)
        if keeps:
            return out, mean, inverse, new_mean, new_var
        running_mean.copy_(new_mean)
        running_var.copy_(new_var)
        return out, mean, inverse

    return Local(batch_norm, site.args, site.kwargs)


@local_rule("native_batch_norm_backward")
def _batch_norm_backward(site: Site) -> Local | None:
    meta = site.call["input"]
    groups = site.groups(meta.layout, *(dim for dim in range(len(meta.shape)) if dim != 1))
    if not groups or not site.call["train"]:
        return None
    count = math.prod(meta.shape) // max(meta.shape[1], 1)
    shape = [1, meta.shape[1] if not site.groups(meta.layout, 1) else -1, *[1] * (len(meta.shape) - 2)]

    def backward(
        grad: Tensor,
        local: Tensor,
        weight: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        train: bool,
        eps: float,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        # As if the statistics were constants; what follows from that they are not is added below.
        variance = inverse.square().reciprocal_().sub_(eps)
        scaled = weight if weight is not None else torch.ones_like(mean)
        if local.numel():
            result, *sums = aten.native_batch_norm_backward(
                grad, local, scaled, mean, variance, None, None, False, eps, [mask[0], True, True]
            )
        else:  # where the kernel divides by zero
            result, sums = torch.empty_like(local), [torch.zeros_like(mean)] * 2
        total = torch.stack(sums)
        for group in groups:
            all_reduce(total, "sum", group)
        by_weight, by_bias = total.unbind()
        if mask[0]:
            scale = scaled * inverse / count
            slope = scale * inverse * by_weight
            constant = scale * by_bias - slope * mean
            result.sub_(torch.addcmul(constant.view(shape), local, slope.view(shape)))
        return result, by_weight if mask[1] else None, by_bias if mask[2] else None

    return Local(backward, site.args, site.kwargs)
