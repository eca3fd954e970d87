"""Copies of bytes. A short copy keeps the interpreter lock, since releasing it costs more; a long one
releases it, and a very long one is shared with a second thread, since one core does not use the whole
bandwidth of the memory.

Both threads take one piece after the other, so nothing waits for a helper that gets no core. PyTorch's own
threads are not used: their number is the user's, and they do not survive a fork.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Final

import numpy as np

from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.interrupts import protected

__all__ = ["copy", "scatter"]

_SHORT_BYTES: Final = 256 << 10
_SHARED_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 4 << 20


def copy(source: memoryview | bytes, target: memoryview) -> None:
    """Copy the bytes of a buffer over another of the same length."""
    if len(source) <= _SHORT_BYTES:
        target[:] = source
    elif len(source) < _SHARED_BYTES or _cores() < 2:
        ctypes.memmove(_address(target), _address(source), len(source))
    else:
        _copy_together(source, target)


@protected
def _copy_together(source: memoryview | bytes, target: memoryview) -> None:
    """Copy with the help of another thread, which has no more pieces to copy when this returns."""
    size, read, written = len(source), _address(source), _address(target)
    pieces = iter(range(0, size, _PIECE_BYTES))
    at_work = _thread.allocate_lock()

    def work() -> None:
        for start in pieces:
            ctypes.memmove(written + start, read + start, min(_PIECE_BYTES, size - start))

    def help_along() -> None:
        with at_work:
            work()

    with contextlib.suppress(RuntimeError):  # the system has no more threads
        _thread.start_new_thread(help_along, ())
    work()
    with at_work:  # the piece that the helper is still copying, if any
        pass


@functools.cache
def _cores() -> int:
    return usable_cores()


def scatter(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy the bytes of some buffers, one after the other, over others of the same total length."""
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
