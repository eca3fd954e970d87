"""Freed memory stays with the process while an agent runs, for what is allocated next.

A training step allocates its gradients and activations anew each time. Left alone, glibc gives such memory
back to the kernel as soon as some megabytes lie free, and each step pays a fault for every page of it: the
backward of a model with 4 MB of parameters took 3.4 ms, and takes 1.8 ms without faults (measured). So as
long as there is an agent, glibc is told to keep more.

The setting is one of the process, and counts for each of glibc's arenas: the main thread's keeps as much free
memory as the option says, that of another thread 64 MiB at most, which is the size of its heaps. What is
larger than 32 MiB goes back to the kernel always. When the last agent is closed, all that lies free is given
back.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

__all__ = ["keep", "release"]

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_INT_MAX: Final = (1 << 31) - 1

_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
_SMALLEST_MMAP_THRESHOLD: Final = 128 << 10

_USUAL_TRIM_THRESHOLD: Final = 64 << 20
"""glibc adapts its thresholds to what is freed, until it is told any. They cannot be read, nor can it go on
adapting; this, and the largest threshold for ``mmap``, is what it comes to where large tensors are freed."""

_USERS_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_USERS_TUNABLES: Final = tuple(
    f"glibc.malloc.{name}" for name in ("trim_threshold", "mmap_threshold", "top_pad")
)

_wanted: Final[list[int]] = []
"""What the agents of this process have asked for."""


def keep(size: int) -> bool:
    """Have glibc keep up to ``size`` bytes of freed memory, until as many are passed to ``release``.

    Of several agents the one that wants most decides.

    Returns:
        False if the allocator is left alone: it is not glibc's, or the environment says how it shall be, or
        ``size`` is 0. Then there is nothing to release.
    """
    libc = ctypes.CDLL(None)
    if not size or not hasattr(libc, "gnu_get_libc_version") or _is_set_by_user():
        return False
    _wanted.append(size)
    _set(libc, max(_wanted))
    return True


def release(size: int, *, give_back: bool = True) -> None:
    """An agent for which ``keep`` returned true is closed.

    Args:
        give_back: if it was the last, give back to the kernel what lies free. (A forked child had better not
            touch it: it shares that memory with its parent.)
    """
    _wanted.remove(size)
    libc = ctypes.CDLL(None)
    if _wanted:
        _set(libc, max(_wanted))
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_THRESHOLD)
    if give_back:
        libc.malloc_trim(ctypes.c_size_t(0))


def _set(libc: ctypes.CDLL, size: int) -> None:
    mapped_from = min(max(size, _SMALLEST_MMAP_THRESHOLD), _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
    libc.mallopt(_M_TRIM_THRESHOLD, min(size, _INT_MAX))


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _USERS_VARIABLES) or any(
        name in tunables for name in _USERS_TUNABLES
    )
