"""Matrix products: a sharded batch stays sharded, and weights are gathered."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from spmd.engine.program.program import Meta
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement, placement_rule

__all__: list[str] = []

_SUMS: Final = ("pr->p", "rp->p")
_MATRICES: Final = ("0r->0", "r1->1", "10->p", *_SUMS)
_BATCHES: Final = ("00->0", "1r->1", "r2->2", "21->p", *_SUMS)
_ROWS: Final = {
    "mm": _MATRICES,
    "addmm": _MATRICES,
    "_addmm_activation": _MATRICES[:2],  # of a sum there is no activation before it is whole
    "bmm": _BATCHES,
    "baddbmm": _BATCHES,
    "addbmm": ("1r->0", "r2->1", "00->p", "21->p", *_SUMS),
    "addmv": ("0r->0", "10->p", *_SUMS),
}
"""Rows of the two factors and the result. A third tensor, to which the product is added, comes first."""

_ADD: Final = ("addmm", "baddbmm", "addbmm", "addmv")


@placement_rule(*_ROWS)
def _rows(call: OperatorCall) -> list[Row]:
    name = call.op._schema.name.removeprefix("aten::").removesuffix("_")
    left, right = call.tensors[-2:]
    rank = {"bmm": 3, "baddbmm": 3, "addmv": 1}.get(name, 2)
    out = (*left.shape[:-1], *right.shape[1:][-1:])[-rank:]
    rows = []
    for text in _ROWS[name]:
        one, two, result = (placement(text[place]) for place in (0, 1, 4))
        added = call.tensors[:-2]
        inputs = (*(_added(meta, out, result) for meta in added), one, two)
        rows.append(Row(inputs, (result,)))
    return rows


def _added(meta: Meta, out: tuple[int, ...], result: Placement) -> Placement:
    """Return the layout for the added tensor, which may be broadcast."""
    if not isinstance(result, Shard):
        return result
    own = result.dim - len(out) + len(meta.shape)
    return Shard(own) if own >= 0 and meta.shape[own] > 1 else Replicate()


@local_rule(*_ADD)
def _without_terms(site: Site) -> Local | None:
    """Multiply by zeros where the sum has no terms on this worker.

    Without terms, PyTorch's kernels multiply by ``beta`` in another way, which does not round it for
    integers.
    """
    left, right = site.call.tensors[-2:]
    shapes = [list(site.local_shape(each)) for each in (left, right)]
    summed = [(len(left.shape) - 1, max(len(right.shape) - 2, 0))]  # dimensions of the two factors
    if site.call.op.name() == "aten::addbmm":
        summed.append((0, 0))
    if all(shapes[0][dim] or not left.shape[dim] for dim, _ in summed):
        return None
    for dims in summed:
        for shape, dim in zip(shapes, dims, strict=True):
            shape[dim] = 1
    operator = site.call.op

    def add(added: Tensor, left: Tensor, right: Tensor, **numbers: Any) -> Tensor:
        factors = (each.new_zeros(shape) for each, shape in zip((left, right), shapes, strict=True))
        found: Tensor = operator(added, *factors, **numbers)
        return found

    return site.runs(add)
