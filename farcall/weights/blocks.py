"""Which part of each tensor a process has: boxes, and the local memory of each. Pure.

A *box* is an offset and sizes in a whole tensor. A plain tensor is one box, the whole. The local tensor of a
DTensor is one box for ``Shard`` and ``Replicate``, several for ``_StridedShard`` where it interleaves. The
indices along one dimension are found by sharding ``arange`` as DTensor shards the tensor, mesh dimension by
mesh dimension from the left; runs of consecutive indices are the boxes' extents.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from farcall.weights.errors import WeightsError
from farcall.weights.layout import DTYPES, name_of_dtype

__all__ = ["Block", "Box", "Piece", "cut", "indices_of", "part_of", "pieces_of"]


class Box(NamedTuple):
    """A block of a whole tensor: where it begins, and its sizes."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the block that a whole tensor is."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def contains(self, other: Box) -> bool:
        """Whether another block, of any numbers, is one inside this one."""
        return len(self.offset) == len(other.offset) == len(other.sizes) and all(
            first <= begin <= begin + size <= first + length
            for first, length, begin, size in zip(*self, *other, strict=True)
        )

    def of(self, whole: Tensor) -> Tensor:
        """Return this block of a tensor, as a view."""
        for dim, (begin, size) in enumerate(zip(self.offset, self.sizes, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return whole


class Block:
    """A block of a larger tensor, for tensors that do not know their place themselves.

    Args:
        tensor: the block; ``put`` reads it, ``get`` writes into it.
        offset: where the block begins in the whole tensor, one number for each dimension.
        shape: shape of the whole tensor.

    Raises:
        WeightsError: the block is not inside the whole tensor.

    Example::

        store.put(step, {"up.weight": weights.Block(local, (0, 512), (1024, 4096))}, part=(rank, size))
    """

    def __init__(self, tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> None:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):  # type: ignore[redundant-expr]
            raise TypeError(f"a Block is made of a plain tensor, not of {type(tensor).__name__}")
        self.tensor = tensor
        self.offset = tuple(operator.index(each) for each in offset)
        self.shape = tuple(operator.index(each) for each in shape)
        sizes = tuple(tensor.shape)
        if not Box.whole(self.shape).contains(Box(self.offset, sizes)):
            raise WeightsError(
                f"a block of shape {sizes} at offset {self.offset} is not inside a tensor of shape "
                f"{self.shape}"
            )

    def __repr__(self) -> str:
        return f"Block({tuple(self.tensor.shape)} at {self.offset} of {self.shape})"


class Piece(NamedTuple):
    """A part of a process's local memory, and the box of the whole tensor that it is."""

    local: Tensor
    box: Box


def pieces_of(name: str, value: Any) -> tuple[list[Piece], tuple[int, ...]]:
    """Return what a process has of a tensor, without empty pieces, and the shape of the whole tensor.

    Raises:
        WeightsError: the value is no tensor, or none that can be stored; the text names it.
    """
    if isinstance(value, DTensor):
        return _of_dtensor(name, value)
    local = value.tensor if isinstance(value, Block) else value
    if not isinstance(local, Tensor):
        raise WeightsError(
            f"{name!r} is {type(value).__name__}, and a version has tensors only: leave it out, or make a "
            "tensor of it"
        )
    _check(name, local)
    shape = value.shape if isinstance(value, Block) else tuple(local.shape)
    offset = value.offset if isinstance(value, Block) else (0,) * len(shape)
    box = Box(offset, tuple(local.shape))
    return ([Piece(local.detach(), box)] if box.volume else []), shape


def _check(name: str, local: Tensor) -> None:
    is_dense = local.layout is torch.strided and not local.is_nested
    if not is_dense or local.is_meta or name_of_dtype(local.dtype) not in DTYPES:
        what = "on the meta device" if local.is_meta else f"of layout {local.layout} and {local.dtype}"
        raise WeightsError(f"{name!r} is {what}: a version has dense tensors with memory only")


def _of_dtensor(name: str, value: DTensor) -> tuple[list[Piece], tuple[int, ...]]:
    shape = tuple(value.shape)
    with torch.no_grad():
        local: Tensor = cast("DTensor", value.detach()).to_local()
    _check(name, local)
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this process is not in the mesh
        return [], shape
    for placement in value.placements:
        if not isinstance(placement, Replicate) and not hasattr(placement, "dim"):
            raise WeightsError(
                f"{name!r} has the placement {placement}, so its values are terms of a sum: redistribute it"
            )
    indices = indices_of(shape, tuple(mesh.shape), coordinate, value.placements)
    sizes = tuple(map(len, indices))
    if sizes != tuple(local.shape):
        raise WeightsError(
            f"the local tensor of {name!r} has shape {tuple(local.shape)}; the placements "
            f"{value.placements} of a tensor of shape {shape} give it {sizes}"
        )
    runs = [_runs(each) for each in indices]
    found = []
    for chosen in itertools.product(*runs):
        box = Box(tuple(begin for _, begin, _ in chosen), tuple(length for *_, length in chosen))
        if box.volume:
            found.append(Piece(Box(tuple(at for at, *_ in chosen), box.sizes).of(local), box))
    return found, shape


def indices_of(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return, for each dimension of a tensor, the indices that one rank of a mesh has, in its order.

    Args:
        shape: shape of the whole tensor.
        mesh: shape of the mesh.
        coordinate: the rank's position in the mesh.
        placements: for each mesh dimension; those that have a ``dim`` shard, by ``torch.chunk``; those that
            have a ``split_factor`` as well shard each of that many chunks, and join what a rank has of each.
    """
    found = [np.arange(length, dtype=np.int64) for length in shape]
    for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim % len(shape)
        factor = int(getattr(placement, "split_factor", 1))
        found[dim] = np.concatenate(
            [_chunk(each, ranks, rank) for each in (_chunk(found[dim], factor, at) for at in range(factor))]
        )
    return found


def _chunk(indices: np.ndarray[Any, Any], count: int, number: int) -> np.ndarray[Any, Any]:
    """Return one chunk, as ``torch.chunk`` makes them; the last ones may be empty."""
    length = -(-len(indices) // count)
    return indices[number * length : (number + 1) * length]


def _runs(indices: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """Split indices into runs of consecutive ones: position in ``indices``, first index, length."""
    if not len(indices):
        return [(0, 0, 0)]
    begins = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(at, int(indices[at]), end - at) for at, end in itertools.pairwise(begins)]


def part_of(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return a process's part of a version: its position in the largest mesh of its DTensors, and the size of
    that mesh; ``(0, 1)`` without DTensors.
    """
    meshes = [value.device_mesh for value in state.values() if isinstance(value, DTensor)]
    largest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if largest is None:
        return 0, 1
    coordinate = largest.get_coordinate()
    if coordinate is None:
        raise WeightsError(
            "this process is not in the mesh of its DTensors: give put(..., part=(index, count))"
        )
    return int(np.ravel_multi_index(tuple(coordinate), tuple(largest.shape))), largest.size()


def cut(box: Box, largest: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``largest`` elements, along its first dimensions."""
    if box.volume <= largest or not box.sizes:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, largest * box.sizes[dim] // box.volume)
    for begin in range(0, box.sizes[dim], rows):
        offset, sizes = list(box.offset), list(box.sizes)
        offset[dim] += begin
        sizes[dim] = min(rows, box.sizes[dim] - begin)
        yield from cut(Box(tuple(offset), tuple(sizes)), largest)
