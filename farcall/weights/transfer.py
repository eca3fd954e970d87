"""Blocks of a version: in the memory of this host, or in calls."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from farcall.weights.blocks import Box, Piece
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout
from farcall.weights.memory import Mapped

__all__ = ["Batch", "Held", "blocks_of", "check", "in_window"]

Batch = list[tuple[str, Box, Tensor]]
"""Names and blocks of whole tensors, and local memory."""

_WINDOW: Final = 6
"""Number of calls with blocks under way."""


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
