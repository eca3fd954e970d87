"""Copying into shared memory: short copies keep the interpreter, long ones let other threads run."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

__all__ = ["copy"]

_SHORT_BYTES: Final = 256 << 10

_copy_keeping_interpreter = ctypes.PyDLL(None).memmove
_copy_keeping_interpreter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_keeping_interpreter.restype = ctypes.c_void_p


def copy(address: int, buffer: memoryview) -> None:
    """Copy a buffer's bytes to an address, where there must be room."""
    source = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    size = len(buffer)
    if size <= _SHORT_BYTES:
        _copy_keeping_interpreter(address, source, size)
    else:
        ctypes.memmove(address, source, size)
