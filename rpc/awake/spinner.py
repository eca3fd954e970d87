"""A thread that keeps one core awake, outside of the interpreter.

A thread of Python's would need the interpreter before and after it spins, and at the lowest priority it might
be stopped for long while it has it. So it is one of the C library's: all that it runs is
``pthread_spin_lock``, which looks again and again at a lock, pausing as processors want it in such loops, and
returns when ``stop`` unlocks it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulong
from typing import Any, Final

__all__ = ["AVAILABLE", "Spinner", "current_core", "spinning"]

_libc: Final = ctypes.CDLL(None)
_with_interpreter: Final = ctypes.PyDLL(None)

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

current_core: Any = _with_interpreter["sched_getcpu"] if AVAILABLE else int
"""The number of the core that the current thread runs on."""

spinning: Final[dict[Spinner, None]] = {}
"""Those of this process. A thread that gives way to others, gives way to these."""
_told_to_end: Final[list[Spinner]] = []
"""Those whose threads may still look at their locks."""
_lock: Final = threading.Lock()
if AVAILABLE:  # a forked child has none of the threads
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release)
    os.register_at_fork(after_in_child=spinning.clear)
    os.register_at_fork(after_in_child=_told_to_end.clear)
    os.register_at_fork(after_in_child=_lock.release)


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

    __slots__ = ("_held", "_thread")

    def __init__(self, core: int) -> None:
        if not 0 <= core < _CORES:
            raise OSError(f"core {core} is none that can be kept awake")
        _forget_those_that_have_ended()
        self._held = c_int()
        self._thread = c_ulong()
        _libc.pthread_spin_init(byref(self._held), 0)
        _libc.pthread_spin_lock(byref(self._held))
        usual = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:  # signals are for the process's other threads
            _check(
                _libc.pthread_create(byref(self._thread), None, _libc.pthread_spin_lock, byref(self._held))
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        spinning[self] = None
        try:
            _check(_libc.pthread_setschedparam(self._thread, os.SCHED_IDLE, byref(c_int(0))))
            only = (c_ubyte * (_CORES // 8))()
            only[core // 8] = 1 << core % 8
            _check(_libc.pthread_setaffinity_np(self._thread, c_size_t(len(only)), byref(only)))
        except OSError:
            self.stop()
            raise

    def stop(self) -> None:
        """Let the core sleep. The thread ends when it next runs. Call this once."""
        _libc.pthread_spin_unlock(byref(self._held))
        del spinning[self]
        with _lock:
            _told_to_end.append(self)

    def _has_ended(self) -> bool:
        """Once this is true it must not be asked again."""
        return not _libc.pthread_tryjoin_np(self._thread, None)


def _forget_those_that_have_ended() -> None:
    with _lock:
        for spinner in _told_to_end.copy():
            if spinner._has_ended():
                _told_to_end.remove(spinner)


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
