"""Softmax along any dimension, sharded or not: maxima and sums are reduced, scores are not moved."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from spmd.engine.program.redistribution import all_reduce
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule

__all__: list[str] = []

_FORWARD: Final = ("_softmax", "_log_softmax")
_BACKWARD: Final = ("_softmax_backward_data", "_log_softmax_backward_data")


@placement_rule(*_FORWARD, *_BACKWARD)
def _rows(call: OperatorCall) -> list[Row]:
    dims = range(len(call.tensors[0].shape))
    return [Row((Shard(dim),) * len(call.tensors), (Shard(dim),)) for dim in dims]


def _groups(site: Site) -> list[Any]:
    meta = site.call.tensors[0]
    return site.groups(meta.layout, site.call["dim"] % len(meta.shape)) if meta.shape else []


def _sum(terms: Tensor, dim: int, groups: list[Any]) -> Tensor:
    total = terms.sum(dim, keepdim=True)
    for group in groups:
        all_reduce(total, "sum", group)
    return total


@local_rule(*_FORWARD)
def _softmax(site: Site) -> Local | None:
    groups, is_log = _groups(site), "log" in site.call.op._schema.name
    if not groups:
        return None

    def softmax(scores: Tensor, dim: int, to_float: bool) -> Tensor:
        scores = scores.float() if to_float else scores
        if scores.shape[dim]:
            largest = scores.amax(dim, keepdim=True)
        else:
            shape = list(scores.shape)
            shape[dim] = 1
            largest = scores.new_full(shape, -math.inf)
        for group in groups:
            all_reduce(largest, "max", group)
        below = scores - largest
        powers = below.exp()
        total = _sum(powers, dim, groups)
        return below.sub_(total.log_()) if is_log else powers.div_(total)

    return Local(softmax, site.args, site.kwargs)


@local_rule(*_BACKWARD)
def _softmax_backward(site: Site) -> Local | None:
    groups, is_log = _groups(site), "log" in site.call.op._schema.name
    if not groups:
        return None

    def backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        if is_log:
            result = grad - output.exp() * _sum(grad, dim, groups)
        else:
            result = output * (grad - _sum(grad * output, dim, groups))
        return result.to(dtype)

    return Local(backward, site.args, site.kwargs)
