"""The shards that workers have, for layouts that cut a tensor into blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from spmd.engine.program.program import Layout, MeshKey
from spmd.tensor_parallel.resharding import chunk

__all__ = ["cut", "extents", "has_blocks", "holders", "put_together"]


def has_blocks(layout: Layout) -> bool:
    """Whether each worker's part is one block of the whole."""
    return all(type(each) in (Replicate, Shard) for each in layout.placements)


def extents(shape: Sequence[int], layout: Layout, worker: int) -> list[tuple[int, int]]:
    """A worker's block: offset and length in each dimension.

    Example::

        extents((5, 3), Layout(MeshKey((0, 1), (2,)), (Shard(0),)), 1)    # [(3, 2), (0, 3)]
    """
    block = [(0, length) for length in shape]
    if layout.mesh is None:
        return block
    coordinates = _coordinates(layout.mesh.devices.index(worker), layout.mesh)
    for placement, count, own in zip(layout.placements, layout.mesh.shape, coordinates, strict=True):
        if isinstance(placement, Shard):
            offset, length = block[placement.dim]
            part, begin = chunk(length, count, own)
            block[placement.dim] = (offset + begin, part)
    return block


def cut(whole: Tensor, layout: Layout, workers: int) -> list[Tensor]:
    """Return each worker's shard, for a layout of blocks. The tensor is not copied if all of it is
    requested.
    """
    assert has_blocks(layout), layout
    if layout.mesh is None:
        return [whole] * workers
    return [_block(whole, extents(whole.shape, layout, worker)).contiguous() for worker in range(workers)]


def holders(layout: Layout, workers: int) -> list[int]:
    """Return workers that together have all parts, each part once."""
    if layout.mesh is None:
        return [0]
    found: dict[tuple[int, ...], int] = {}
    for place, worker in enumerate(layout.mesh.devices):
        sharded = zip(_coordinates(place, layout.mesh), layout.placements, strict=True)
        found.setdefault(tuple(own for own, each in sharded if isinstance(each, Shard)), worker)
    return list(found.values())


def put_together(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout, parts: dict[int, Tensor]
) -> Tensor:
    """Return the whole tensor, from its shards by worker."""
    if layout.mesh is None:
        return next(iter(parts.values()))
    whole = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    for worker, part in parts.items():
        _block(whole, extents(shape, layout, worker)).copy_(part)
    return whole


def _coordinates(place: int, mesh: MeshKey) -> list[int]:
    found: list[int] = []
    for count in reversed(mesh.shape):
        place, own = divmod(place, count)
        found.insert(0, own)
    return found


def _block(whole: Tensor, block: list[tuple[int, int]]) -> Tensor:
    for dim, (offset, length) in enumerate(block):
        whole = whole.narrow(dim, offset, length)
    return whole
