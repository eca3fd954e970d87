"""Matrix products: a sharded batch stays sharded, and weights are gathered."""

from __future__ import annotations

from typing import Final

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine.program.program import Meta
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule

__all__: list[str] = []

_MATRICES: Final = ("0r->0", "r1->1", "10->p", "pr->p", "rp->p")
_BATCHES: Final = ("00->0", "1r->1", "r2->2", "21->p", "pr->p", "rp->p")


def _placement(letter: str) -> Placement:
    return {"r": Replicate(), "p": Partial()}.get(letter) or Shard(int(letter))


@placement_rule("mm", "bmm", "addmm", "baddbmm")
def _rows(call: OperatorCall) -> list[Row]:
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    adds = name in ("addmm", "baddbmm")
    left, right = call.tensors[-2:]
    out = (*left.shape[:-1], right.shape[-1])
    rows = []
    for text in _MATRICES if name in ("mm", "addmm") else _BATCHES:
        one, two, result = (_placement(text[place]) for place in (0, 1, 4))
        inputs = (_added(call.tensors[0], out, result), one, two) if adds else (one, two)
        rows.append(Row(inputs, (result,)))
    return rows


def _added(meta: Meta, out: tuple[int, ...], result: Placement) -> Placement:
    """Return the layout for the added tensor, which may be broadcast."""
    if not isinstance(result, Shard):
        return result
    own = result.dim - len(out) + len(meta.shape)
    return Shard(own) if own >= 0 and meta.shape[own] > 1 else Replicate()
