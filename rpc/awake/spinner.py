"""A thread that keeps one core awake, outside of the interpreter.

A thread of Python's would need the interpreter before and after it spins, and at the lowest priority it might
be stopped for long while it has it. So it is one of the C library's: all that it runs is
``pthread_spin_lock``, which looks again and again at a lock, and returns when ``stop`` unlocks it.

The calls below keep the interpreter: none waits for anything, and what lies between making the thread and
lowering its priority must not take long.
"""

from __future__ import annotations

import ctypes
import os
import signal
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulong, c_void_p
from typing import Any, Final

__all__ = ["AVAILABLE", "Spinner", "current_core", "spinning"]

_libc: Final = ctypes.PyDLL(None)

_NEEDED: Final = (
    "pthread_create",
    "pthread_setaffinity_np",
    "pthread_setschedparam",
    "pthread_spin_init",
    "pthread_spin_lock",
    "pthread_spin_unlock",
    "pthread_tryjoin_np",
    "sched_getcpu",
)
AVAILABLE: Final = hasattr(os, "SCHED_IDLE") and all(hasattr(_libc, name) for name in _NEEDED)
"""Whether the system has what is needed, as Linux does."""

_CORES: Final = 1024
"""Cores that have a higher number are left alone."""

current_core: Any = _libc["sched_getcpu"] if AVAILABLE else int
"""The number of the core that the current thread runs on."""

_malloc: Final[Any] = _libc["malloc"] if AVAILABLE else None
_free: Final[Any] = _libc["free"] if AVAILABLE else None

spinning: Final[dict[Spinner, None]] = {}
"""Those of this process. A thread that gives way to others, gives way to these."""
_told_to_end: Final[list[Spinner]] = []
"""Those whose threads may still look at their locks."""
if AVAILABLE:
    _malloc.restype = c_void_p
    _free.restype = None
    os.register_at_fork(after_in_child=spinning.clear)  # it has none of the threads
    os.register_at_fork(after_in_child=_told_to_end.clear)


class Spinner:
    """Keeps a core awake from when it is made until ``stop``.

    Args:
        core: its number.

    Raises:
        OSError: the system does not allow it, or has no more threads.

    Example::

        spinner = Spinner(current_core())
        spinner.stop()
    """

    __slots__ = ("_lock", "_thread")

    def __init__(self, core: int) -> None:
        if not 0 <= core < _CORES:
            raise OSError(f"core {core} is none that can be kept awake")
        _forget_those_that_have_ended()
        self._thread = c_ulong()
        self._lock = c_void_p(_malloc(c_size_t(ctypes.sizeof(c_int))))  # which outlives the interpreter
        _libc.pthread_spin_init(self._lock, 0)
        _libc.pthread_spin_lock(self._lock)
        usual = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:  # signals are for the process's other threads
            error = _libc.pthread_create(byref(self._thread), None, _libc.pthread_spin_lock, self._lock)
            error = error or self._lower(core)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        if error:
            raise OSError(error, os.strerror(error))

    def _lower(self, core: int) -> int:
        """Bind the thread to its core at the lowest priority; if that fails end it and return the error."""
        spinning[self] = None
        only = (c_ubyte * (_CORES // 8))()
        only[core // 8] = 1 << core % 8
        error: int = _libc.pthread_setschedparam(self._thread, os.SCHED_IDLE, byref(c_int(0)))
        error = error or _libc.pthread_setaffinity_np(self._thread, c_size_t(len(only)), byref(only))
        if error:
            self.stop()
        return error

    def stop(self) -> None:
        """Let the core sleep. The thread ends when it next runs. Call this once."""
        _told_to_end.append(self)
        _libc.pthread_spin_unlock(self._lock)
        del spinning[self]

    def _forget(self) -> bool:
        """Free what the thread has needed, if it has ended; after that the spinner is of no use."""
        if _libc.pthread_tryjoin_np(self._thread, None):
            return False
        _free(self._lock)
        return True


def _forget_those_that_have_ended() -> None:
    for _ in range(len(_told_to_end)):
        try:
            spinner = _told_to_end.pop()  # by this, no other thread has it
        except IndexError:
            return
        if not spinner._forget():
            _told_to_end.insert(0, spinner)
