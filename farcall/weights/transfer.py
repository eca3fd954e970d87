"""What a process has of the tensors of a model, and how blocks of a version go there: in the memory of this
host, or in calls.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from farcall.weights.blocks import Block, Box, Piece, cut, pieces_of
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout, Spec, name_of_dtype
from farcall.weights.memory import Mapped

__all__ = [
    "Batch",
    "Held",
    "batches",
    "blocks_of",
    "box_from_wire",
    "box_to_wire",
    "check",
    "described",
    "in_window",
    "overlaps_itself",
    "same_bits",
    "wholes",
]

Batch = list[tuple[str, Box, Tensor]]
"""Names and blocks of whole tensors, and local memory."""

_MESSAGE_BYTES: Final = 8 << 20
"""Maximum size in bytes of blocks that go in one call; a longer row of a tensor is cut."""

_WINDOW: Final = 6
"""Number of calls with blocks under way."""


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


def batches(pieces: Mapping[str, Sequence[Piece]]) -> Iterator[Batch]:
    """Cut and group pieces for calls: names, blocks of whole tensors, and their local memory."""
    batch: Batch = []
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


@dataclass(frozen=True, slots=True)
class Held:
    """A version that this process has a lease of, with this ticket."""

    ticket: int
    number: int
    layout: Layout
    segments: list[Any]
    live: list[Any]
    serial: int

    @classmethod
    def of(cls, ticket: int, answer: Any) -> Held:
        """Return what ``Keeper.open`` has described."""
        number, wire, segments, live, serial = answer
        return cls(ticket, number, Layout.from_wire(wire), segments, live, serial)


def blocks_of(
    layout: Layout, mapped: Sequence[Mapped], pieces: Mapping[str, Sequence[Piece]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, local memory, and the block of a version in the memory of this host, of each piece."""
    data = [each.data for each in mapped]
    for name, own in pieces.items():
        whole = layout.tensor(data, name)
        for piece in own:
            yield name, piece.local, piece.box.of(whole)


def in_window(call: Callable[[Any], Any], batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Make a call for each batch, several at a time; yields the batches with their answers."""
    under_way: collections.deque[tuple[Any, Any]] = collections.deque()
    try:
        for batch in batches:
            under_way.append((batch, call(batch)))
            if len(under_way) >= _WINDOW:
                done, future = under_way.popleft()
                yield done, future.wait()
        while under_way:
            done, future = under_way.popleft()
            yield done, future.wait()
    finally:  # after an error, no block may be written later than those of another attempt
        for _, future in under_way:
            with contextlib.suppress(Exception):
                future.wait()


def check(store: str, batch: Batch, data: Any) -> None:
    """Raise ``WeightsError`` if these are not the blocks that were asked for."""
    for (name, _, local), tensor in zip(batch, data, strict=True):
        if tensor.shape != local.shape or tensor.dtype != local.dtype:
            raise WeightsError(f"store '{store}' sent another block of {name!r} than was asked for")


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
