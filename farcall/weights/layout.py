"""How a version lies in memory: each tensor whole, one after another, in one or several segments. Pure.

Each part of a version that names tensors which no part before it has named adds a segment with these. So the
ranks of one model share a single segment, and stages of a pipeline have one each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farcall.weights.errors import WeightsError

__all__ = ["DTYPES", "Entry", "Layout", "Spec", "difference", "name_of_dtype"]

_ALIGNMENT: Final = 64
_LARGEST_BYTES: Final = 1 << 62

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not re.match(r"torch\.(q|bits|u?int[1-7]$)", str(dtype))
}
"""Types of elements, by the names under which they travel: those that PyTorch can copy."""


class Spec(NamedTuple):
    """What a whole tensor is."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Entry(NamedTuple):
    """Where a tensor lies: the number of its segment, and its first byte there."""

    spec: Spec
    segment: int
    begin: int


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name under which a type of elements travels."""
    return str(dtype).removeprefix("torch.")


class Layout:
    """Where the tensors of a version lie. ``sizes`` are those of its segments, in bytes."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.sizes: list[int] = []

    @property
    def bytes(self) -> int:
        """Size of all segments in bytes."""
        return sum(self.sizes)

    @property
    def specs(self) -> dict[str, Spec]:
        """What each tensor is, by name."""
        return {name: entry.spec for name, entry in self.entries.items()}

    def add(self, specs: Mapping[str, Spec]) -> int | None:
        """Add a segment with the tensors that are new; returns its size, or None if none is."""
        new: dict[str, Entry] = {}
        begin = 0
        for name, spec in specs.items():
            if name not in self.entries:
                new[name] = Entry(spec, len(self.sizes), begin)
                begin += -(-spec.bytes // _ALIGNMENT) * _ALIGNMENT
        if begin > _LARGEST_BYTES:
            raise WeightsError(f"the tensors of this part have {begin} bytes")
        if not new:
            return None
        self.entries |= new
        self.sizes.append(max(begin, _ALIGNMENT))
        return self.sizes[-1]

    def remove_last(self) -> None:
        """Remove the segment that was added last."""
        last = len(self.sizes) - 1
        self.entries = {name: entry for name, entry in self.entries.items() if entry.segment != last}
        self.sizes.pop()

    def tensor(self, segments: Sequence[Tensor], name: str) -> Tensor:
        """Return a whole tensor, as a view of the bytes of its segment."""
        (dtype, shape), segment, begin = self.entries[name]
        data = segments[segment][begin : begin + self.entries[name].spec.bytes]
        return data.view(DTYPES[dtype]).view(shape)

    def to_wire(self) -> list[Any]:
        """Return it as lists of texts and numbers."""
        return [
            self.sizes,
            [[name, dtype, list(shape), *at] for name, ((dtype, shape), *at) in self.entries.items()],
        ]

    @classmethod
    def from_wire(cls, wire: Any) -> Layout:
        """Return what ``to_wire`` has described: tensors that lie in their segments. Raises ``WeightsError``
        for anything else.
        """
        try:
            sizes, entries = wire
            layout = cls()
            layout.sizes = [_count(size) for size in sizes]
            for name, dtype, shape, segment, begin in entries:
                spec = spec_from_wire(dtype, shape)
                if not isinstance(name, str) or name in layout.entries:
                    raise ValueError(name)
                if not 0 <= _count(begin) <= layout.sizes[_count(segment)] - spec.bytes:
                    raise ValueError(name)
                if begin % _ALIGNMENT:
                    raise ValueError(name)
                layout.entries[name] = Entry(spec, segment, begin)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise WeightsError(f"a malformed layout of a version: {error!r:.200}") from None
        return layout


def spec_from_wire(dtype: Any, shape: Iterable[Any]) -> Spec:
    """Return a spec of what has travelled; ``WeightsError`` if it is none."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WeightsError(f"tensors of type {dtype!r:.40} cannot be stored")
    try:
        return Spec(dtype, tuple(_count(length) for length in shape))
    except (TypeError, ValueError):
        raise WeightsError(f"{shape!r:.80} is no shape") from None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_BYTES:
        raise ValueError(value)
    return value


def difference(wanted: Mapping[str, Spec], there: Mapping[str, Spec]) -> str | None:
    """Describe the first tensor in which what is asked for differs from a version; None if none does."""
    for name, spec in wanted.items():
        if name not in there:
            return f"it has no tensor {name!r}"
        if there[name] != spec:
            return f"its {name!r} is {there[name]}, and that of the caller {spec}"
    missing = [name for name in there if name not in wanted]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"the caller has no tensor {missing[0]!r}{more}"
    return None
