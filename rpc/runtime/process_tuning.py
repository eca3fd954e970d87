"""An agent's settings for its whole process: thread switches, kept memory, signal handlers.

Parts of PyTorch that are not ready for several threads are initialized first
(``rpc.runtime.autograd_engine``).

*Thread switches.* A call in a process whose main thread computes waits for the GIL two or three times, 5 ms
each by Python's default. So the interval is shortened.

*Freed memory.* A training step allocates its gradients and activations anew each time. By default, glibc
returns such memory to the kernel, and each step pays a page fault for every page of it: the backward pass of
a model with 4 MB of parameters took 3.4 ms, and takes 1.8 ms without faults. So glibc is configured to keep
more, in each of its arenas: the main thread's keeps as much as the option says, another thread's at most 64
MiB, which is the size of its heaps. Blocks larger than 32 MiB are always returned to the kernel.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Final

from rpc.runtime.autograd_engine import renew_autograd_engine
from rpc.runtime.interrupts import defer_interrupts, protected, restore_interrupts

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_INT_MAX: Final = (1 << 31) - 1

_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
_SMALLEST_MMAP_THRESHOLD: Final = 128 << 10

_USUAL_TRIM_THRESHOLD: Final = 64 << 20
"""Threshold that glibc reaches by itself when large tensors are freed, as does the largest threshold for
``mmap``. glibc adapts its thresholds until one is set; they cannot be read, and the adaptation cannot be
resumed.
"""

_USERS_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_USERS_TUNABLES: Final = tuple(
    f"glibc.malloc.{name}" for name in ("trim_threshold", "mmap_threshold", "top_pad")
)


@dataclass
class ProcessTuning:
    """One agent's settings. The allocator is left alone if it is not glibc's, or if the environment
    configures it.
    """

    switch_interval: float | None  # in seconds; None keeps the interpreter's. A shorter one is kept
    kept_memory_bytes: int  # freed memory to keep, in bytes; 0 leaves the allocator alone
    _applied: bool = False
    _interval_before: float | None = None
    _libc: ctypes.CDLL | None = None

    @protected
    def apply(self) -> None:
        """Put the settings into effect, until ``restore``."""
        defer_interrupts()
        self._applied = True
        renew_autograd_engine()
        if self.switch_interval is not None:
            self._interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(self._interval_before, self.switch_interval))
        libc = ctypes.CDLL(None)
        size = self.kept_memory_bytes
        if size and hasattr(libc, "gnu_get_libc_version") and not _is_set_by_user():
            self._libc = libc
            mapped_from = min(max(size, _SMALLEST_MMAP_THRESHOLD), _LARGEST_MMAP_THRESHOLD)
            libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
            libc.mallopt(_M_TRIM_THRESHOLD, min(size, _INT_MAX))

    def restore(self, *, give_back: bool = True) -> None:
        """Undo ``apply``, and return free memory to the kernel, unless it is a parent's memory."""
        if self._interval_before is not None:
            sys.setswitchinterval(self._interval_before)
        libc, self._libc = self._libc, None
        if libc is not None:
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            libc.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_THRESHOLD)
            if give_back:
                libc.malloc_trim(ctypes.c_size_t(0))
        if self._applied:
            self._applied = False
            restore_interrupts()  # last, since a handler may raise from here on


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _USERS_VARIABLES) or any(
        name in tunables for name in _USERS_TUNABLES
    )
