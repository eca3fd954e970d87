"""The state of a model, and the part of it that each shard has. On its way it is on the CPU, as there need be
no device maps between clients and shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from spmd.tensor_parallel.errors import ParallelError
from spmd.tensor_parallel.resharding import chunk

__all__ = ["StatePart", "cut_state", "part_of", "whole_of"]


@dataclass(frozen=True)
class StatePart:
    """A shard's part of one entry of the state.

    Attributes:
        local: its part; None: the whole, which rank 0 gives.
        dim: along which the parts make the whole; None if each has the whole.
        shape: of the whole.
    """

    local: Tensor | None
    dim: int | None
    shape: tuple[int, ...]


def part_of(value: Tensor, rank: int) -> StatePart:
    """Return a rank's part of an entry of its state."""
    dim, local = None, value
    if isinstance(value, DTensor):
        (placement,) = value.placements
        dim, local = placement.dim if isinstance(placement, Shard) else None, value.to_local()
    return StatePart(None if dim is None and rank else local.detach().cpu(), dim, tuple(value.shape))


def whole_of(parts: Sequence[StatePart]) -> Tensor:
    """The whole, from the parts of all shards."""
    dim = parts[0].dim
    tensors = [part.local for part in parts if part.local is not None]
    return tensors[0] if dim is None else torch.cat(tensors, dim)


def cut_state(
    state: Mapping[str, Tensor], parts: Sequence[Mapping[str, StatePart]]
) -> list[dict[str, Tensor]]:
    """A whole state as the shards take it, each its part.

    Args:
        state: by name.
        parts: what each shard has.

    Raises:
        ParallelError: names or shapes are not those of the shards' state.
    """
    if state.keys() != parts[0].keys():
        odd = ", ".join(sorted(state.keys() ^ parts[0].keys()))
        raise ParallelError(f"the state and the model differ in: {odd}")
    return [
        {name: _cut(state[name], part, rank, len(parts), name) for name, part in each.items()}
        for rank, each in enumerate(parts)
    ]


def _cut(whole: Tensor, part: StatePart, rank: int, count: int, name: str) -> Tensor:
    if tuple(whole.shape) != part.shape:
        raise ParallelError(f"expected {name} of shape {[*part.shape]}, got {[*whole.shape]}")
    if part.dim is None:
        return whole.cpu()
    length, offset = chunk(part.shape[part.dim], count, rank)
    return whole.narrow(part.dim, offset, length).contiguous().cpu()
