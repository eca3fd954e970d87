"""Copying into shared memory: short copies keep the interpreter, long ones let other threads run."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

__all__ = ["Copier"]

_SHORT_BYTES: Final = 256 << 10


class Copier:
    """Copies buffers, from any thread."""

    def copy(self, buffer: Any, into: memoryview) -> None:
        """Copy a buffer's bytes over another buffer of the same length."""
        size = len(buffer)
        if size <= _SHORT_BYTES:
            into[:] = buffer
        else:
            ctypes.memmove(_address(into), _address(buffer), size)


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
