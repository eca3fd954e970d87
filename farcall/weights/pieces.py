"""What a process has of the tensors of a model: described, and cut into blocks that go in calls. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from farcall.weights.blocks import Block, Box, Piece, cut, pieces_of
from farcall.weights.layout import Spec, name_of_dtype

__all__ = ["batches", "box_from_wire", "box_to_wire", "described", "overlaps_itself", "same_bits", "wholes"]

_MESSAGE_BYTES: Final = 8 << 20
"""Maximum size in bytes of blocks that go in one call; a longer row of a tensor is cut."""


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """Return whole tensors as pieces of local memory; without empty ones."""
    return {
        name: [Piece(tensor, Box.whole(tensor.shape))] for name, tensor in tensors.items() if tensor.numel()
    }


def described(state: Mapping[str, Any]) -> tuple[dict[str, list[Piece]], dict[str, Spec]]:
    """Return what this process has of each tensor, and what the whole tensors are."""
    if not isinstance(state, Mapping):
        raise TypeError(f"expected tensors by name, such as a state_dict, not {type(state).__name__}")
    pieces, specs = {}, {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"names of tensors are texts, not {name!r:.80}")
        pieces[name], shape = pieces_of(name, value)
        dtype = (value.tensor if isinstance(value, Block) else value).dtype
        specs[name] = Spec(name_of_dtype(dtype), shape)
    return pieces, specs


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether a tensor is expanded, so that several elements are one in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def batches(pieces: Mapping[str, Sequence[Piece]]) -> Iterator[list[tuple[str, Box, Tensor]]]:
    """Cut and group pieces for calls: names, blocks of whole tensors, and their local memory."""
    batch: list[tuple[str, Box, Tensor]] = []
    size = 0
    for name, own in pieces.items():
        for local, whole in own:
            for box in cut(whole, max(1, _MESSAGE_BYTES // local.element_size())):
                inner = Box(tuple(map(operator.sub, box.offset, whole.offset)), box.sizes)
                added = box.volume * local.element_size()
                if batch and size + added > _MESSAGE_BYTES:
                    yield batch
                    batch, size = [], 0
                batch.append((name, box, inner.of(local)))
                size += added
    if batch:
        yield batch


def box_to_wire(box: Box) -> list[list[int]]:
    """Return a box as it goes in calls."""
    return [list(box.offset), list(box.sizes)]


def box_from_wire(wire: Any) -> Box:
    """Return the box that ``box_to_wire`` has encoded."""
    offset, sizes = wire
    return Box(tuple(offset), tuple(sizes))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits."""
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    data = tensor.detach().cpu().resolve_conj().resolve_neg()
    return data.contiguous().reshape(-1).view(torch.uint8)
