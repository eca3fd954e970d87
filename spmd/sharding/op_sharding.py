"""The sharding of one tensor, tile by tile, in PyTorch/XLA's notation.

``{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}`` means: two tiles along the first dimension of the tensor,
one along the second, and two workers hold each tile. Workers are listed tile by tile. A tensor that all
workers hold completely is ``{replicated}``; ``{manual}`` is a tensor for which only the program knows how its
shards are related.

A dimension of size n in p tiles is cut into pieces of ``ceil(n / p)``, so the last ones may be short or
empty. DTensor cuts it in the same way; but if two dimensions of a mesh cut one dimension of a tensor, DTensor
cuts the pieces of the first cut once more, and XLA cuts all at once. So a layout refers to the user's mesh if
both agree, and otherwise to a mesh in which these dimensions are merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from spmd.engine.program.layouts import chunks
from spmd.engine.program.program import REPLICATED, Layout, MeshKey

__all__ = ["MANUAL", "WHOLE", "OpSharding", "ShardingType", "layout_of"]


class ShardingType(IntEnum):
    """The kinds of sharding."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclass(frozen=True, slots=True)
class OpSharding:
    """Which worker holds which tile.

    Attributes:
        type: ``REPLICATED``, ``TILED``, ``PARTIAL`` (several workers hold the same tile) or ``MANUAL``.
        tiles: number of tiles for each dimension of the tensor. Empty unless there are tiles.
        devices: the workers' numbers, tile by tile; those that hold the same tile are adjacent.

    Example::

        >>> str(OpSharding.tiled((2, 1), (0, 1, 2, 3)))
        '{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}'
    """

    type: ShardingType
    tiles: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    @classmethod
    def tiled(cls, tiles: Sequence[int], devices: Sequence[int]) -> OpSharding:
        """Return the sharding with these tiles; ``WHOLE`` if there is one."""
        count = math.prod(tiles)
        if count == 1:
            return WHOLE
        kind = ShardingType.TILED if count == len(devices) else ShardingType.PARTIAL
        return cls(kind, tuple(int(each) for each in tiles), tuple(int(each) for each in devices))

    @classmethod
    def of_layout(cls, layout: Layout, dims: int) -> OpSharding:
        """How a tensor of ``dims`` dimensions with this layout is cut, with all sums taken."""
        if layout.mesh is None:
            return WHOLE
        cut_by: list[list[int]] = [[] for _ in range(dims)]
        for axis, placement in enumerate(layout.placements):
            if isinstance(placement, Shard):
                cut_by[placement.dim].append(axis)
        order = [axis for axes in cut_by for axis in axes]
        rest = [axis for axis in range(len(layout.mesh.shape)) if axis not in order]
        devices = np.array(layout.mesh.devices).reshape(layout.mesh.shape).transpose(order + rest)
        tiles = [math.prod(layout.mesh.shape[axis] for axis in axes) for axes in cut_by]
        return cls.tiled(tiles, devices.ravel().tolist())

    @classmethod
    def parse(cls, text: str) -> OpSharding:
        """The reverse of ``str``.

        Raises:
            ValueError: the text is no sharding, or says of no whole number of workers what they hold.
        """
        if text == "{replicated}":
            return WHOLE
        if text == "{manual}":
            return MANUAL
        if not text:
            raise ValueError("sharding has no value: no sharding was specified for this tensor")
        found = _TILED.fullmatch(text)
        if found is None:
            raise ValueError(f"sharding is not organized as expected, {{devices=[2,2]0,1,2,3}}: {text}")
        tiles = [int(each) for each in found["tiles"].split(",")]
        devices = [int(each) for each in found["devices"].split(",")]
        if math.prod(tiles) != len(devices):
            raise ValueError(f"sharding has {len(devices)} devices for {math.prod(tiles)} tiles: {text}")
        return cls.tiled(tiles[:-1] if found["replicas"] else tiles, devices)

    def __str__(self) -> str:
        if self.type is ShardingType.MANUAL:
            return "{manual}"
        if not self.tiles:
            return "{replicated}"
        devices = ",".join(map(str, self.devices))
        if self.type is ShardingType.TILED:
            return f"{{devices=[{','.join(map(str, self.tiles))}]{devices}}}"
        tiles = ",".join(map(str, (*self.tiles, self.replicas)))
        return f"{{devices=[{tiles}]{devices} last_tile_dim_replicate}}"

    @property
    def replicas(self) -> int:
        """Number of workers that hold each tile."""
        return len(self.devices) // math.prod(self.tiles)

    def layout(self, shape: Sequence[int]) -> Layout:
        """How the engine says that a tensor of this shape is cut so."""
        if not self.tiles:
            return REPLICATED
        devices = np.array(self.devices).reshape((*self.tiles, self.replicas))
        return layout_of(devices, [(dim,) for dim in range(len(self.tiles))], shape)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard with its padding, for a tensor of this shape."""
        if not self.tiles:
            return tuple(shape)
        return tuple(-(-size // count) for size, count in zip(shape, self.tiles, strict=True))

    def indices(self, shape: Sequence[int], device: int) -> tuple[slice, ...]:
        """Return the elements that a worker holds, a slice for each dimension; without padding."""
        if not self.tiles:
            return tuple(slice(0, size, 1) for size in shape)
        tile = np.unravel_index(self.devices.index(device) // self.replicas, self.tiles)
        return tuple(
            slice(min(int(index) * full, size), min((int(index) + 1) * full, size), 1)
            for size, full, index in zip(shape, self.shard_shape(shape), tile, strict=True)
        )

    def replica_id(self, device: int) -> int:
        """Return the position of a worker among those that hold the same."""
        return self.devices.index(device) % self.replicas if self.tiles else device


_TILED: Final = re.compile(
    r"\{devices=\[(?P<tiles>\d+(,\d+)*)\](?P<devices>\d+(,\d+)*)(?P<replicas> last_tile_dim_replicate)?\}"
)

WHOLE: Final = OpSharding(ShardingType.REPLICATED)
"""Every worker holds the whole tensor."""

MANUAL: Final = OpSharding(ShardingType.MANUAL)
"""Only the program knows what the shards are."""


def layout_of(
    devices: np.ndarray, cut_by: Sequence[Sequence[int]], shape: Sequence[int] | None = None
) -> Layout:
    """The layout of a tensor that dimensions of a mesh cut.

    Args:
        devices: the mesh, as an array of the workers' numbers.
        cut_by: for each dimension of the tensor, the dimensions of the mesh that cut it, in this order.
        shape: of the tensor; None where it cuts evenly.

    Example::

        >>> layout_of(np.arange(4).reshape(2, 2), [(1, 0)]).mesh
        MeshKey(devices=(0, 2, 1, 3), shape=(2, 2))
    """
    cut_by = [[axis for axis in axes if devices.shape[axis] > 1] for axes in cut_by]
    axes = [axis for axis in range(devices.ndim) if devices.shape[axis] > 1]
    if shape is not None and not all(
        _cuts_agree(size, [devices.shape[axis] for axis in each])
        for size, each in zip(shape, cut_by, strict=True)
    ):
        return _merged(devices, cut_by, axes)
    order = list(axes)
    dim_of: dict[int, int] = {}
    for dim, each in enumerate(cut_by):
        # Axes that a spec names out of order change places with each other; the others keep theirs.
        for place, axis in zip(sorted(order.index(axis) for axis in each), each, strict=True):
            axes[place] = axis
            dim_of[axis] = dim
    arranged = devices.squeeze().transpose([order.index(axis) for axis in axes])
    placements = tuple(Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in axes)
    return _on(arranged, placements)


def _merged(devices: np.ndarray, cut_by: Sequence[Sequence[int]], axes: Sequence[int]) -> Layout:
    """With one dimension of the mesh for each that is cut."""
    order = [axis for each in cut_by for axis in each]
    rest = [axis for axis in axes if axis not in order]
    ones = [axis for axis in range(devices.ndim) if axis not in axes]
    cuts = [(dim, math.prod(devices.shape[axis] for axis in each)) for dim, each in enumerate(cut_by) if each]
    sizes = [count for _, count in cuts] + [devices.shape[axis] for axis in rest]
    placements = tuple(Shard(dim) for dim, _ in cuts) + tuple(Replicate() for _ in rest)
    return _on(devices.transpose(order + rest + ones).reshape(sizes), placements)


def _on(devices: np.ndarray, placements: tuple[Placement, ...]) -> Layout:
    if not placements:
        return REPLICATED
    return Layout.of(MeshKey(tuple(devices.ravel().tolist()), devices.shape), placements)


def _cuts_agree(size: int, parts: Sequence[int]) -> bool:
    """Whether cutting pieces again gives the same pieces as cutting all at once."""
    if len(parts) < 2 or size % math.prod(parts) == 0:
        return True
    pieces = [size]
    for count in parts:
        pieces = [cut for piece in pieces for cut in chunks(piece, count)]
    return pieces == chunks(size, math.prod(parts))
