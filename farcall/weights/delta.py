"""The difference between two versions of a tensor, bit for bit: which elements changed, and their new bits.
Pure.

Positions go as *gaps*, the number of unchanged elements before each changed one, in one byte; 255 means to
add it and go on with the next byte. The bits are absolute, so a delta that is applied twice does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from farcall.weights.errors import WeightsError

__all__ = ["apply", "changes", "encode"]

Array = np.ndarray[Any, Any]

_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK: Final = 1 << 20
"""Number of elements that are compared at a time, so that they stay in the processor's cache."""


def changes(pairs: Iterable[tuple[str, Tensor, Tensor]], most: int) -> list[list[Any]] | None:
    """Return name, gaps and bits of the tensors that differ; None if they take more than ``most`` bytes.
    ``pairs`` has the name of each tensor, its old and its new version.
    """
    found: list[list[Any]] = []
    for name, old, new in pairs:
        encoded = encode(old, new, most)
        if encoded is None:
            return None
        most -= sum(map(len, encoded))
        if len(encoded[0]):
            found.append([name, *encoded])
    return found


def encode(old: Tensor, new: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """Return the gaps and the new bits of the elements that changed, as bytes; None if these are more than
    ``most`` bytes.

    Args:
        old, new: contiguous, of one type and shape.
        most: number of bytes.
    """
    before, after = _bits(old), _bits(new)
    gaps: list[Array] = []
    bits: list[Array] = []
    last = -1
    for begin in range(0, before.size, _BLOCK):
        block = after[begin : begin + _BLOCK]
        changed = np.flatnonzero(before[begin : begin + _BLOCK] != block)
        if changed.size:
            gaps.append(_gaps(changed, begin, last))
            bits.append(block[changed].view(np.uint8))
            last = begin + int(changed[-1])
            most -= len(gaps[-1]) + len(bits[-1])
            if most < 0:
                return None
    return _joined(gaps), _joined(bits)


def apply(gaps: Tensor, bits: Tensor, into: Tensor) -> None:
    """Make the old version of a contiguous tensor the new one.

    Raises:
        WeightsError: this is no delta of such a tensor; nothing has changed.
    """
    target = _bits(into)
    positions = _positions(gaps.numpy())
    values = bits.numpy()
    if len(values) != len(positions) * target.itemsize or (
        len(positions) and int(positions[-1]) >= target.size
    ):
        raise WeightsError(f"a malformed difference of a tensor of shape {tuple(into.shape)}")
    target[positions] = np.ascontiguousarray(values).view(target.dtype)


def _bits(tensor: Tensor) -> Array:
    """Return the bits of a contiguous tensor; for complex128, two elements for each."""
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    size = min(tensor.element_size(), 8)
    found: Array = flat.view(_BITS[size])
    return found


def _joined(parts: list[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, np.uint8)]))


def _gaps(changed: Array, begin: int, last: int) -> Array:
    """Return the gaps before positions from ``begin`` on, of which the one before was ``last``."""
    gaps = np.diff(changed, prepend=last - begin) - 1
    more = gaps // 255
    found = np.full(len(gaps) + int(more.sum()), 255, np.uint8)
    found[np.cumsum(more + 1) - 1] = gaps - more * 255
    return found


def _positions(gaps: Array) -> Array:
    ends = gaps != 255
    total = np.cumsum(gaps, dtype=np.int64)[ends]
    found: Array = total + np.arange(len(total))
    return found
