"""Copying bytes. A short copy keeps the interpreter, since letting go costs more, a long one does not."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["copy", "scatter"]

_SHORT_BYTES: Final = 256 << 10


def copy(source: memoryview | bytes, target: memoryview) -> None:
    """Copy the bytes of a buffer over another of the same length."""
    if len(source) <= _SHORT_BYTES:
        target[:] = source
    else:
        ctypes.memmove(_address(target), _address(source), len(source))


def scatter(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy the bytes of some buffers, one after the other, over others that have as many in all."""
    rest = iter(targets)
    target = memoryview(b"")
    for each in sources:
        source = memoryview(each)
        while source:
            if not target:
                target = next(rest)
            count = min(len(source), len(target))
            copy(source[:count], target[:count])
            source, target = source[count:], target[count:]


def _address(buffer: memoryview | bytes) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
