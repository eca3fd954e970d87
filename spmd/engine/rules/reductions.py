"""Means, norms, ``all`` and ``any``, and positions of maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from spmd.engine.program.redistribution import all_reduce
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule

__all__: list[str] = []

aten: Any = torch.ops.aten


def _reduced(call: OperatorCall, name: str = "dim") -> list[int]:
    rank = len(call.tensors[0].shape)
    try:
        given = call[name]
    except KeyError:
        given = None
    if given is None or (isinstance(given, Sequence) and not given):
        return list(range(rank))
    return sorted(each % rank for each in ([given] if isinstance(given, int) else given)) if rank else []


def _keeps(call: OperatorCall) -> bool:
    try:
        return bool(call["keepdim"])
    except KeyError:
        return False


def _after(dim: int, reduced: Sequence[int], keep: bool) -> int:
    """Return the new number of a dimension that is not reduced."""
    return dim if keep else dim - sum(each < dim for each in reduced)


@placement_rule("mean", "mean.dim")
def _mean_rows(call: OperatorCall) -> list[Row]:
    reduced, keep = _reduced(call), _keeps(call)
    rows = [Row((Partial(),), (Partial(),))]
    for dim in range(len(call.tensors[0].shape)):
        after = Partial() if dim in reduced else Shard(_after(dim, reduced, keep))
        rows.append(Row((Shard(dim),), (after,)))
    return rows


@local_rule("mean", "mean.dim")
def _mean(site: Site) -> Local | None:
    """A mean: a sum, divided by the number of elements of the whole, since shards may differ in size."""
    meta = site.call.tensors[0]
    reduced = _reduced(site.call)
    if not site.groups(meta.layout, *reduced) or not reduced:
        return None
    count, keep = math.prod(meta.shape[dim] for dim in reduced), _keeps(site.call)
    dtype = site.kwargs.get("dtype") or meta.dtype

    def mean(local: Tensor) -> Tensor:
        return local.sum(reduced, keep, dtype=accumulated_in(dtype)).div_(count).to(dtype)

    return Local(mean, site.args[:1], {})


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: in 16 bits they may overflow where a mean, or a root, of the sum does
    not.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@placement_rule("argmax", "argmin", "logsumexp")
def _arg_rows(call: OperatorCall) -> list[Row]:
    if call["dim"] is None:
        return []
    reduced, keep = _reduced(call), _keeps(call)
    return [
        Row((Shard(dim),), (Shard(_after(dim, reduced, keep)),))
        for dim in range(len(call.tensors[0].shape))
        if dim not in reduced
    ]


_TRUTHS: Final = ("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")


def _reduced_truths(call: OperatorCall) -> list[int]:
    """Return the reduced dimensions, like other reductions; but an empty list means none here."""
    by_list = call.op._overloadname == "dims" and call["dim"] is not None
    return [] if by_list and not call["dim"] else _reduced(call)


@placement_rule(*_TRUTHS)
def _truth_rows(call: OperatorCall) -> list[Row]:
    """Rows of ``all`` and ``any``, which are reduced at once: a sum of booleans would be multiplied and
    counted as one of numbers.
    """
    reduced, keep = _reduced_truths(call), _keeps(call)
    return [
        Row((Shard(dim),), (Replicate() if dim in reduced else Shard(_after(dim, reduced, keep)),))
        for dim in range(len(call.tensors[0].shape))
    ]


@local_rule(*_TRUTHS)
def _truth(site: Site) -> Local | None:
    reduced = _reduced_truths(site.call)
    groups = site.groups(site.call.tensors[0].layout, *reduced) if reduced else []
    if not groups:
        return None
    operation = "max" if "any" in site.call.op.name() else "min"

    def truth(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = site.call.op(*args, **kwargs)
        numbers = found.to(torch.uint8)
        for group in groups:
            all_reduce(numbers, operation, group)
        return numbers.to(found.dtype)

    return Local(truth, site.args, site.kwargs)


@placement_rule("linalg_vector_norm")
def _norm_rows(call: OperatorCall) -> list[Row]:
    reduced, keep = _reduced(call), _keeps(call)
    return [
        Row((Shard(dim),), (Replicate() if dim in reduced else Shard(_after(dim, reduced, keep)),))
        for dim in range(len(call.tensors[0].shape))
    ]


@local_rule("linalg_vector_norm")
def _norm(site: Site) -> Local | None:
    reduced = _reduced(site.call)
    groups = site.groups(site.call.tensors[0].layout, *reduced)
    if not groups or not reduced:
        return None
    order = site.call["ord"]

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        return reduce_norms(aten.linalg_vector_norm.default(*args, **kwargs), order, groups)

    # An empty shard has neither a largest nor a smallest element.
    if (order < 0 or order == math.inf) and 0 in site.local_shape(site.call.tensors[0]):
        (result,) = site.results
        assert result is not None
        shape, nothing = site.local_shape(result), math.inf if order < 0 else 0.0

        def empty(local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return reduce_norms(torch.full(shape, nothing, dtype=result.dtype), order, groups)

        return Local(empty, site.args, site.kwargs)
    return Local(norm, site.args, site.kwargs)


def reduce_norms(norms: Tensor, order: float, groups: Sequence[Any]) -> Tensor:
    """Combine norms of shards, which may be overwritten, to norms of the whole tensors.

    Args:
        order: p of the p-norm.
        groups: process groups over which the tensors are sharded.
    """
    if order in (math.inf, -math.inf) or order == 0:
        operation = "sum" if order == 0 else "max" if order > 0 else "min"
        for group in groups:
            all_reduce(norms, operation, group)
        return norms
    powers = norms.to(accumulated_in(norms.dtype)).pow_(order)
    for group in groups:
        all_reduce(powers, "sum", group)
    return powers.pow_(1 / order).to(norms.dtype)
