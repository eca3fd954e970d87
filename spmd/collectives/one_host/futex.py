"""Sleeping until a word of shared memory changes: Linux's futex, across processes."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any, Final

__all__ = ["AVAILABLE", "wait", "wake"]

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_NUMBER: Final = _NUMBERS.get(platform.machine())

AVAILABLE: Final = sys.platform == "linux" and _NUMBER is not None
"""Whether this system has futexes, and their system call is known here."""

_WAIT: Final = 0
_WAKE: Final = 1
_EVERYBODY: Final = (1 << 31) - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load() -> Any:
    call = ctypes.CDLL(None).syscall
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return call


_syscall: Final = _load() if AVAILABLE else None


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the word at ``address`` is ``seen``, until it is woken, at most for the given time.

    It may also return early, for example because of a signal, so the caller must check the word again. The
    interpreter lock is released meanwhile.
    """
    assert _syscall is not None
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_NUMBER, address, _WAIT, seen, ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``, in all processes. Takes about a microsecond."""
    assert _syscall is not None
    _syscall(_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)
