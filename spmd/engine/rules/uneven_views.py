"""Views that join dimensions, or split them, of batches that workers cannot share evenly.

Of 13 rows of 12, four workers have 4, 4, 4 and 1; of the 156 elements in one dimension they must have 39
each. A worker's shard is one piece of the dimensions that are joined or split, before and after, so elements
move between neighbours only, and no tensor is ever whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from spmd.engine.program.layouts import chunks, coordinates, is_shard
from spmd.engine.program.program import Layout, Meta
from spmd.engine.program.redistribution import all_to_all
from spmd.engine.rules.local_rules import Site

__all__ = ["placed_view", "rebalanced"]


@dataclass(frozen=True)
class _Run:
    """Dimensions of a tensor, and of its view, that have the same elements: ``range(*before)`` and so on."""

    before: tuple[int, int]
    after: tuple[int, int]

    def is_one(self) -> bool:
        """Whether it is a dimension that does not change."""
        return self.before[1] - self.before[0] == self.after[1] - self.after[0] == 1


def _runs(before: Sequence[int], after: Sequence[int]) -> list[_Run]:
    """The shortest such runs, from left to right."""
    found: list[_Run] = []
    i = j = 0
    while i < len(before) or j < len(after):
        a, b, one, other = i, j, 1, 1
        while one != other or (i == a and j == b):
            if (one <= other and i < len(before)) or j == len(after):
                one *= before[i]
                i += 1
            else:
                other *= after[j]
                j += 1
        found.append(_Run((a, i), (b, j)))
    return found


def _first(shape: Sequence[int], dims: tuple[int, int]) -> int | None:
    """The first dimension that is not 1."""
    return next((dim for dim in range(*dims) if shape[dim] != 1), None)


def placed_view(meta: Meta, shape: Sequence[int]) -> tuple[Layout, Layout] | None:
    """Return the layout in which each shard of a tensor is one piece, and that of its view.

    None if that is impossible.

    Args:
        meta: meta of a sharded tensor.
        shape: shape of the view; -1 for the remaining length.
    """
    key = meta.layout.mesh
    if key is None or 0 in meta.shape:
        return None
    known = math.prod(each for each in shape if each != -1)
    shape = [math.prod(meta.shape) // known if each == -1 else each for each in shape]
    runs = _runs(meta.shape, shape)
    before: list[Placement] = []
    after: list[Placement] = []
    taken: set[_Run] = set()
    for placement in meta.layout.placements:
        if type(placement) is Shard:
            run = next(each for each in runs if each.before[0] <= placement.dim < each.before[1])
            source = placement.dim if run.is_one() else _first(meta.shape, run.before)
            target = run.after[0] if run.is_one() else _first(shape, run.after)
            if source is None or target is None or (run in taken and not run.is_one()):
                return None
            taken.add(run)
            before.append(Shard(source))
            after.append(Shard(target))
        elif is_shard(placement):
            return None
        else:
            before.append(placement)
            after.append(placement)
    placed = Layout.of(key, tuple(before)), Layout.of(key, tuple(after))
    moves = _moves(replace(meta, layout=placed[0]), Meta(tuple(shape), (), meta.dtype, placed[1]))
    return placed if len(moves) < 2 else None


def rebalanced(site: Site) -> Any:
    """Return a function of a worker's shard, if the worker must have other elements of the view than it has;
    otherwise None.
    """
    (before,), (after,) = site.call.tensors, site.results
    assert after is not None
    moves = _moves(before, after)
    if not moves:
        return None
    key = before.layout.mesh
    assert key is not None
    ((axis, run, has, wants),) = moves
    place = coordinates(key, site.rank)[axis]
    group = site.meshes(key).get_group(axis)
    gives = [_common(has[place], each) for each in wants]
    takes = [_common(each, wants[place]) for each in has]
    result = site.local_shape(after)

    def rebalance(local: Tensor, *_: Any) -> Tensor:
        begin, end = has[place]
        outer, inner = local.shape[: run.before[0]], local.shape[run.before[1] :]
        pieces = local.reshape(math.prod(outer), end - begin, math.prod(inner))
        sent = [pieces[:, one - begin : two - begin].contiguous() for one, two in gives]
        got = [pieces.new_empty((pieces.shape[0], two - one, pieces.shape[2])) for one, two in takes]
        all_to_all(sent, got, group)
        return torch.cat(got, 1).reshape(result)

    return rebalance


_Piece = tuple[int, int]


def _moves(before: Meta, after: Meta) -> list[tuple[int, _Run, list[_Piece], list[_Piece]]]:
    """Return axes along which workers must have other elements of a run than they have, each with both."""
    key = before.layout.mesh
    if key is None or after.layout.mesh != key or 0 in before.shape:
        return []
    runs = _runs(before.shape, after.shape)
    found = []
    pairs = zip(before.layout.placements, after.layout.placements, strict=True)
    for axis, (old, new) in enumerate(pairs):
        if type(old) is not Shard or type(new) is not Shard:
            continue
        run = next(each for each in runs if each.before[0] <= old.dim < each.before[1])
        size = key.shape[axis]
        has = _pieces(before.shape[old.dim], math.prod(before.shape[old.dim + 1 : run.before[1]]), size)
        wants = _pieces(after.shape[new.dim], math.prod(after.shape[new.dim + 1 : run.after[1]]), size)
        is_one_piece = math.prod(before.shape[run.before[0] : old.dim]) == 1
        if has != wants and is_one_piece:
            found.append((axis, run, has, wants))
    return found


def _pieces(length: int, inner: int, size: int) -> list[_Piece]:
    ends = [0, *itertools.accumulate(each * inner for each in chunks(length, size))]
    return list(itertools.pairwise(ends))


def _common(one: _Piece, other: _Piece) -> _Piece:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return begin, max(begin, end)
