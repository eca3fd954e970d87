"""What an agent sets for its whole process while it runs: when threads switch, what memory is kept, Ctrl-C.

What PyTorch has not made ready for several threads is made ready first (``rpc.runtime.autograd_engine``).

*Thread switches.* A call in a process whose main thread computes waits for the interpreter two or three
times, 5 ms each by Python's default. So the interval is shortened.

*Freed memory.* A training step allocates its gradients and activations anew each time. Left alone, glibc
gives such memory back to the kernel, and each step pays a fault for every page of it: the backward of a model
with 4 MB of parameters took 3.4 ms, and takes 1.8 ms without faults. So glibc is told to keep more, in each
of its arenas: the main thread's keeps as much as the option says, another thread's 64 MiB at most, which is
the size of its heaps. What is larger than 32 MiB goes back to the kernel always.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Final

from rpc.runtime.autograd_engine import renew_autograd_engine
from rpc.runtime.interrupts import defer_interrupts, restore_interrupts

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


@dataclass
class ProcessTuning:
    """One agent's settings. The allocator is left alone if it is not glibc's, or where the environment says
    what it shall do.
    """

    switch_interval: float | None  # in seconds; None leaves the interpreter's alone. A shorter one stays
    kept_memory_bytes: int  # how much freed memory to keep; 0 leaves the allocator alone
    _interval_before: float | None = None
    _libc: ctypes.CDLL | None = None

    def apply(self) -> None:
        """Put the settings into effect, until ``restore``."""
        defer_interrupts()
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
        """Undo ``apply``, and return to the kernel what lies free, unless that is a parent's memory."""
        restore_interrupts()
        if self._interval_before is not None:
            sys.setswitchinterval(self._interval_before)
        libc, self._libc = self._libc, None
        if libc is not None:
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            libc.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_THRESHOLD)
            if give_back:
                libc.malloc_trim(ctypes.c_size_t(0))


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in _USERS_VARIABLES) or any(
        name in tunables for name in _USERS_TUNABLES
    )
