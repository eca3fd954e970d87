"""Partition specs: for each dimension of a tensor, the dimensions of a mesh that shard it.

``("data", None)`` shards the first dimension over the axis *data* and does not shard the second. An axis is
given by name or number; a tuple of axes shards one dimension over all of them, the first named the slowest to
change. The tensor is replicated along axes that a spec does not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Axes", "PartitionSpec", "check_length", "resolve"]

PartitionSpec: TypeAlias = tuple["int | str | tuple[int | str | None, ...] | None", ...]
"""One entry for each dimension of a tensor."""

Axes: TypeAlias = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the numbers of the mesh's axes that cut it."""


def check_length(spec: PartitionSpec, dims: int) -> None:
    """Check that a spec has one entry for each of ``dims`` dimensions.

    Raises:
        AssertionError: it does not.
        TypeError: it is not a tuple.
    """
    if not isinstance(spec, (tuple, list)):
        raise TypeError(
            f"a partition spec is a tuple with an entry for each of {dims} dimensions, as ('data', None); "
            f"got {spec!r}"
        )
    if len(spec) != dims:
        raise AssertionError(
            f"Partition spec length ({len(spec)}) should be equal to the input rank ({dims}). Write None "
            f"for each dimension that stays whole: {spec}"
        )


def resolve(spec: PartitionSpec, names: Sequence[str] | None, axes: int) -> Axes:
    """Return the numbers of the axes that a spec names.

    Args:
        spec: see above.
        names: names of the mesh's axes, if they have names.
        axes: number of axes of the mesh.

    Raises:
        ValueError: an axis that the mesh has not, or an entry that is no axis.
        AssertionError: a number beyond the mesh's axes, an axis named twice, a tuple in a tuple.

    Example::

        >>> resolve((("model", "data"), None, 2), ("data", "model", "pipe"), 3)
        ((1, 0), (), (2,))
    """
    resolved: list[tuple[int, ...]] = []
    for entry in spec:
        several = entry if isinstance(entry, tuple) else (entry,)
        if any(isinstance(each, tuple) for each in several):
            raise AssertionError(f"Partition spec cannot contain nested tuples: {spec}")
        resolved.append(tuple(_number(each, spec, names) for each in several if each is not None))
    used = [axis for each in resolved for axis in each]
    if any(not 0 <= axis < axes for axis in used):
        raise AssertionError(f"partition_spec {spec} contains out of bound index into mesh_shape.")
    if len(set(used)) < len(used):
        raise AssertionError(
            f"Each device mesh dimension should appear at most once in partition_spec {spec}."
        )
    return tuple(resolved)


def _number(axis: object, spec: PartitionSpec, names: Sequence[str] | None) -> int:
    if isinstance(axis, str):
        if names is None or axis not in names:
            known = f"its axes are {', '.join(names)}" if names else "its axes have no names"
            raise ValueError(f"Axis name {axis} is not defined in the given mesh: {known}")
        return list(names).index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool):
        return axis
    raise ValueError(
        f"Spec type {type(axis)} is not supported in partition spec {spec}: an entry is None, the number or "
        "the name of an axis, or a tuple of these"
    )
