"""Layouts of tensors, and the moves that change them.

All of it is pure: what a worker does follows from shapes, layouts and the worker's number. Shards are
DTensor's: along one dimension of a mesh, ``ceil(length / size)`` elements, of which the last shards may be
shorter, or empty. Placements apply from the first dimension of the mesh to the last, each to the result of
the previous ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine.program.program import Layout, MeshKey, Meta
from spmd.torch_internals import StridedShard

__all__ = ["Move", "chunks", "coordinates", "is_local", "is_shard", "line", "local_shape", "plan"]


def chunks(length: int, count: int) -> list[int]:
    """The lengths of ``count`` shards.

    Example::

        chunks(5, 4)  # [2, 2, 1, 0]
    """
    each = -(-length // count)
    return [max(0, min(each, length - place * each)) for place in range(count)]


def is_shard(placement: Placement) -> TypeGuard[Shard | StridedShard]:
    """Whether a placement cuts a dimension of the tensor."""
    return isinstance(placement, (Shard, StridedShard))


def is_local(source: Layout, target: Layout) -> bool:
    """Whether workers can change the layout without sending anything, from what all of them have."""
    if source.mesh is None or source == target:
        return True
    if source.mesh != target.mesh:
        return False
    pairs = zip(source.placements, target.placements, strict=True)
    return all(now.is_replicate() or now == want for now, want in pairs)


@functools.lru_cache(maxsize=4096)
def coordinates(key: MeshKey, rank: int) -> tuple[int, ...]:
    """The position of a worker in a mesh."""
    place = key.devices.index(rank)
    found: list[int] = []
    for size in reversed(key.shape):
        place, at = divmod(place, size)
        found.insert(0, at)
    return tuple(found)


def line(key: MeshKey, axis: int, rank: int) -> list[int]:
    """The workers along an axis of a mesh, through one of them, in order."""

    def others(worker: int) -> tuple[int, ...]:
        at = coordinates(key, worker)
        return (*at[:axis], *at[axis + 1 :])

    return [each for each in key.devices if others(each) == others(rank)]


def local_shape(meta: Meta, rank: int) -> tuple[int, ...]:
    """The shape of a worker's part of a value."""
    return _shape_after(meta.shape, meta.layout, rank, len(meta.layout.placements))


def _shape_after(shape: Sequence[int], layout: Layout, rank: int, count: int) -> tuple[int, ...]:
    """Return the shard's shape after the first ``count`` placements."""
    left = list(shape)
    if layout.mesh is not None:
        at = coordinates(layout.mesh, rank)
        for dim, placement in enumerate(layout.placements[:count]):
            if isinstance(placement, StridedShard):
                pieces = chunks(left[placement.dim], int(placement.split_factor))
                left[placement.dim] = sum(chunks(each, layout.mesh.shape[dim])[at[dim]] for each in pieces)
            elif is_shard(placement):
                left[placement.dim] = chunks(left[placement.dim], layout.mesh.shape[dim])[at[dim]]
    return tuple(left)


# ---- moves


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a redistribution, along one dimension of a mesh.

    Attributes:
        kind: ``reduce``, ``reduce_scatter``, ``gather``, ``exchange`` (from shards of ``source`` to shards of
            ``dim``), ``slice``, or ``part`` (a replicated value becomes one term of a sum).
        mesh, axis: the mesh, and its dimension.
        dim: dimension of the tensor.
        lengths: lengths of the shards along it, by position.
        place: position of this worker.
        operation: the reduction: ``sum``, ``avg``, ``max``, ``min`` or ``product``.
        strided: number of pieces that the dimension consists of, each of which is sharded; 1 for all but
            DTensor's ``StridedShard``.
        source, source_lengths: dimension and lengths of the shards that an exchange gathers.
        turned: whether shards are sent as rows, whatever ``dim`` is, so that a transposed weight is not
            copied; the same for all workers, whatever strides their shards have.
    """

    kind: str
    mesh: MeshKey
    axis: int
    place: int
    dim: int = 0
    lengths: tuple[int, ...] = ()
    operation: str = "sum"
    strided: int = 1
    source: int = 0
    source_lengths: tuple[int, ...] = ()
    turned: bool = False


def plan(shape: Sequence[int], source: Layout, target: Layout, rank: int) -> list[Move]:
    """Return the moves that a worker applies to its shard of a tensor, in order.

    Args:
        shape: shape of the whole tensor.
        source, target: layouts; if they are on two meshes, the tensor is replicated in between.
        rank: number of the worker.
    """
    if source == target:
        return []
    if source.mesh is not None and target.mesh is not None and source.mesh != target.mesh:
        return plan(shape, source, Layout(), rank) + plan(shape, Layout(), target, rank)
    key = cast("MeshKey", source.mesh or target.mesh)
    return _Plan(tuple(shape), key, source, target, rank).moves


class _Plan:
    def __init__(
        self, shape: tuple[int, ...], key: MeshKey, source: Layout, target: Layout, rank: int
    ) -> None:
        whole: tuple[Placement, ...] = (Replicate(),) * len(key.shape)
        self._shape, self._key, self._rank = shape, key, rank
        self._at = coordinates(key, rank)
        self._now = list(source.placements or whole)
        self._want = target.placements or whole
        self.moves: list[Move] = []
        changed = {
            axis
            for axis, (old, new) in enumerate(zip(self._now, self._want, strict=True))
            if not _same(old, new)
        }
        axis = min(changed, default=0)
        if len(changed) == 1 and self._can_exchange(axis):
            self._exchange(axis)
            return
        undone = self._undone(changed)
        sums = [each for each in sorted(undone) if self._is_summed(each)]
        gathers = [each for each in sorted(undone, reverse=True) if is_shard(self._now[each])]
        for each in sums:  # while it is small
            if gathers or not self._want[each].is_replicate():
                self._reduce(each)
        for each in gathers:
            self._gather(each)
        for each in sorted(undone):
            self._place(each)
        for each in sums:
            if not _same(self._now[each], self._want[each]):
                self._reduce(each)

    def _length(self, axis: int, dim: int) -> int:
        """Return the length of a dimension of the tensor, before the placement at ``axis`` applies."""
        return _shape_after(self._shape, Layout(self._key, tuple(self._now)), self._rank, axis)[dim]

    def _add(self, kind: str, axis: int, **given: Any) -> None:
        self.moves.append(Move(kind, self._key, axis, self._at[axis], **given))

    def _inner(self, axis: int, dim: int) -> bool:
        """Whether a later placement shards the dimension further."""
        return any(is_shard(each) and each.dim == dim for each in self._now[axis + 1 :])

    def _undone(self, changed: set[int]) -> set[int]:
        """Return the placements that change, and those that shard further what changes."""
        undone = set(changed)
        for axis in range(len(self._now)):
            if axis in undone:
                dims = {each.dim for each in (self._now[axis], self._want[axis]) if is_shard(each)}
                undone |= {
                    later
                    for later in range(axis + 1, len(self._now))
                    for placement in (self._now[later],)
                    if is_shard(placement) and placement.dim in dims
                }
        return undone

    def _is_summed(self, axis: int) -> bool:
        """Whether it is reduced by a move of its own."""
        return self._now[axis].is_partial() and not self._can_scatter(axis)

    def _can_scatter(self, axis: int) -> bool:
        now, want = self._now[axis], self._want[axis]
        size = self._key.shape[axis]
        return (
            isinstance(now, Partial)
            and type(want) is Shard
            and now.reduce_op in ("sum", "avg")
            and self._shape[want.dim] % math.prod(self._key.shape[: axis + 1]) == 0
            and self._shape[want.dim] >= size
        )

    def _can_exchange(self, axis: int) -> bool:
        now, want = self._now[axis], self._want[axis]
        return (
            type(now) is Shard
            and type(want) is Shard
            and not self._inner(axis, now.dim)
            and not self._inner(axis, want.dim)
        )

    def _exchange(self, axis: int) -> None:
        now, want = cast("Shard", self._now[axis]), cast("Shard", self._want[axis])
        size = self._key.shape[axis]
        self._add(
            "exchange",
            axis,
            dim=want.dim,
            lengths=tuple(chunks(self._length(axis, want.dim), size)),
            source=now.dim,
            source_lengths=tuple(chunks(self._length(axis, now.dim), size)),
        )

    def _reduce(self, axis: int) -> None:
        self._add("reduce", axis, operation=_operation(self._now[axis]))
        self._now[axis] = Replicate()

    def _gather(self, axis: int) -> None:
        placement = cast("Shard", self._now[axis])
        self._add("gather", axis, **self._sharding(axis, placement))
        self._now[axis] = Replicate()

    def _sharding(self, axis: int, placement: Shard | StridedShard) -> dict[str, Any]:
        length, size = self._length(axis, placement.dim), self._key.shape[axis]
        strided = int(getattr(placement, "split_factor", 1))
        if strided > 1 and length % (strided * size):
            raise ValueError(f"{length} rows cannot be laid out as {placement} over {size} workers")
        return {"dim": placement.dim, "lengths": tuple(chunks(length, size)), "strided": strided}

    def _place(self, axis: int) -> None:
        want = self._want[axis]
        if self._can_scatter(axis):
            sharding = self._sharding(axis, cast("Shard", want))
            self._add("reduce_scatter", axis, operation=_operation(self._now[axis]), **sharding)
        elif is_shard(want):
            self._add("slice", axis, **self._sharding(axis, want))
        elif want.is_partial():
            self._add("part", axis, operation=_operation(want))
        else:
            return
        self._now[axis] = want


def _same(old: Placement, new: Placement) -> bool:
    return type(old) is type(new) and old == new


def _operation(placement: Placement) -> str:
    return cast("Partial", placement).reduce_op
