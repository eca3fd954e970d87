"""Placement rules: what an operator can do with shards, as rows for one dimension of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from rpc.runtime.torch_internals import pytree
from spmd.engine.program.layouts import is_shard
from spmd.engine.program.program import Meta
from spmd.torch_internals import StridedShard

__all__ = ["PLACEMENT_RULES", "OperatorCall", "Row", "choose", "placement", "placement_rule", "tensors_of"]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator and its arguments, with a ``Meta`` for each tensor.

    Attributes:
        op: the overload; also of in-place operations.
        tensors: all metas, in flattened order.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Meta, ...]

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its name in the schema; its default if it is not given."""
        for place, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if place < len(self.args):
                    return self.args[place]
                return self.kwargs.get(name, argument.default_value if argument.has_default_value() else None)
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Row:
    """Placements along one dimension of a mesh that are valid together.

    Attributes:
        inputs: placement of each tensor, in flattened order.
        results: placement of each result, in flattened order.
    """

    inputs: tuple[Placement, ...]
    results: tuple[Placement, ...]


PlacementRule = Callable[[OperatorCall], "list[Row] | None"]
PLACEMENT_RULES: Final[dict[str, PlacementRule]] = {}
"""The placement rules by the name of the functional operator. A rule returns rows, without that of replicated
tensors; or None, in which case DTensor is asked.
"""


def placement_rule(*names: str) -> Callable[[PlacementRule], PlacementRule]:
    """Register the decorated function as the rule of these operators of ``aten``."""

    def register(rule: PlacementRule) -> PlacementRule:
        for name in names:
            PLACEMENT_RULES[f"aten::{name}"] = rule
        return rule

    return register


def tensors_of(args: Any, kwargs: Any) -> tuple[Meta, ...]:
    """The metas in arguments, in flattened order."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda each: isinstance(each, Meta))
    return tuple(each for each in leaves if isinstance(each, Meta))


def pattern(call: OperatorCall, text: str) -> list[Row]:
    """Parse rows in short form, such as ``0rr->0|r00->1``: a letter for each tensor of the schema, in order.

    A digit is a sharded dimension, ``r`` is replicated, ``p`` a sum. Letters of tensors that are not given
    are skipped.
    """
    given = [
        isinstance(call[argument.name], Meta)
        for argument in call.op._schema.arguments
        if isinstance(argument.type, torch.TensorType) or str(argument.type) == "Optional[Tensor]"
    ]
    rows = []
    for one in text.split("|"):
        before, after = one.split("->")
        letters = [letter for letter, is_given in zip(before, given, strict=True) if is_given]
        rows.append(Row(tuple(map(placement, letters)), tuple(map(placement, after))))
    return rows


def placement(letter: str) -> Placement:
    """A placement in short form, see :func:`pattern`."""
    return {"r": Replicate(), "p": Partial()}.get(letter) or Shard(int(letter))


# ---- which row

_KEEPS_BATCH: Final = 8.0
"""Factor for the cost of moving a batch, since everything computed from it would have to follow."""

_BATCH_COMES_SECOND: Final = ("aten::addmm", "aten::baddbmm", "aten::embedding")


def choose(call: OperatorCall, rows: Sequence[Row], axis: int, size: int, bytes_of: Sequence[int]) -> Row:
    """Return the row that moves the fewest bytes; the first of them, if there are several.

    Args:
        rows: rows to choose from.
        axis: dimension of the mesh.
        size: number of workers along it.
        bytes_of: size of each tensor in bytes.
    """
    batch = 1 if call.op._schema.name in _BATCH_COMES_SECOND else 0

    def cost(row: Row) -> float:
        pairs = zip(call.tensors, row.inputs, bytes_of, strict=True)
        return sum(
            _cost(_now(meta, axis), want, count, size, place == batch)
            for place, (meta, want, count) in enumerate(pairs)
        )

    def is_cut(row: Row) -> bool:
        """Whether it takes a sum in pieces."""
        pairs = zip(call.tensors, row.inputs, strict=True)
        return any(_now(meta, axis).is_partial() and is_shard(want) for meta, want in pairs)

    def moves_sums_alone(row: Row) -> bool:
        pairs = zip(call.tensors, row.inputs, strict=True)
        return all(_now(meta, axis).is_partial() or _now(meta, axis) == want for meta, want in pairs)

    best = min(rows, key=cost)
    if is_cut(best):  # half as expensive at first; but then all following layers would gather their weights
        whole = [row for row in rows if not is_cut(row) and moves_sums_alone(row)]
        return min(whole, key=cost, default=best)
    return best


_IN_ORDER: Final = ("aten::embedding", "aten::nll_loss_forward", "aten::nll_loss_backward")
"""Rules that depend on which rows a worker has."""


def strided(call: OperatorCall, rows: Sequence[Row], axis: int) -> list[Row]:
    """The same rows for dimensions that are sharded in pieces, as some views leave them."""
    factors = {
        each.split_factor for meta in call.tensors if isinstance(each := _now(meta, axis), StridedShard)
    }
    if call.op._schema.name in _IN_ORDER:
        return []

    def in_pieces(placements: Sequence[Placement], factor: Any) -> tuple[Placement, ...]:
        return tuple(
            StridedShard(each.dim, split_factor=factor) if isinstance(each, Shard) else each
            for each in placements
        )

    return [
        Row(in_pieces(row.inputs, factor), in_pieces(row.results, factor))
        for factor in factors
        for row in rows
    ]


def _now(meta: Meta, axis: int) -> Placement:
    return meta.layout.placements[axis] if meta.layout.placements else Replicate()


def _cost(now: Placement, want: Placement, count: int, size: int, is_first: bool) -> float:
    if type(now) is type(want) and now == want:
        return 0.0
    if now.is_replicate():
        return 0.01 * count + 1e-6  # only memory is moved, but keeping a layout is preferred to sharding
    rest = (size - 1) / size
    if is_shard(now):
        moved = count * rest / size if is_shard(want) else count * rest
        return moved * _KEEPS_BATCH if now.dim == 0 and is_first else moved
    return count * rest if is_shard(want) else 2 * count * rest


# ---- rules in short

_SHORT: Final = {
    "channel_shuffle": "0->0",
    "native_channel_shuffle": "0->0",
    "avg_pool2d": "0->0|1->1",
    "avg_pool2d_backward": "00->0|11->1",
    "avg_pool3d": "0->0|1->1",
    "avg_pool3d_backward": "00->0|11->1",
    "_adaptive_avg_pool2d": "0->0|1->1",
    "_adaptive_avg_pool2d_backward": "00->0|11->1",
    "adaptive_max_pool2d": "0->00|1->11",
    "adaptive_max_pool2d_backward": "000->0|111->1",
    "max_pool2d_with_indices": "0->00|1->11",
    "max_pool2d_with_indices_backward": "000->0|111->1",
    "im2col": "0->0",
    "col2im": "0->0",
    "convolution_backward": "00r->0pp|1r0->p00|r11->11r",
    "pixel_shuffle": "0->0",
    "pixel_unshuffle": "0->0",
    "reflection_pad1d": "0->0",
    "reflection_pad1d_backward": "00->0",
    "reflection_pad2d": "0->0",
    "reflection_pad2d_backward": "00->0",
    "replication_pad2d": "0->0",
    "replication_pad2d_backward": "00->0",
    "native_group_norm": "0rr->000",
    "native_group_norm_backward": "0000r->0pp",
}


@placement_rule(*_SHORT)
def _short(call: OperatorCall) -> list[Row] | None:
    name = call.op.name().removeprefix("aten::")
    if name == "convolution_backward":
        if len(call["input"].shape) != len(call["weight"].shape):
            return []  # without a batch
    elif not name.startswith("native_group_norm"):
        spatial = 3 if "3d" in name else 1 if "1d" in name else 2
        if len(call.tensors[0].shape) != spatial + 2:
            return []  # without a batch
    if name == "convolution_backward" and (call["groups"] != 1 or call["transposed"]):
        return pattern(call, "00r->0pp")
    return pattern(call, _SHORT[name])


@placement_rule("convolution")
def _convolution(call: OperatorCall) -> list[Row]:
    if len(call["input"].shape) != len(call["weight"].shape):
        return []
    plain = call["groups"] == 1 and not call["transposed"]
    if not plain:
        return pattern(call, "0rr->0")
    return pattern(call, "0rr->0|r00->1" + ("" if isinstance(call["bias"], Meta) else "|11r->p"))
