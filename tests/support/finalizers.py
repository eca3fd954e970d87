"""Code of the user's that runs in the middle of farcall's: finalizers of what farcall releases, and of
garbage that is collected while a lock is held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["HookedLock", "Memory", "ends_soon", "is_free", "running_in_locked_sections"]

_SOON = 20.0


class Memory(bytearray):
    """A buffer that calls ``release`` when it is released."""

    release: Callable[[], object] = int

    def __del__(self) -> None:
        self.release()


def is_free(use: Callable[[], object]) -> bool:
    """Whether another thread can use an object now: the current one holds no lock of it."""
    return ends_soon(use)


def ends_soon(function: Callable[[], object], seconds: float = _SOON) -> bool:
    """Whether a function ends, on another thread, and does not wait for ever."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


class HookedLock:
    """A lock that calls a function each time that it is acquired, while it is held."""

    def __init__(self, lock: Any, acquired: Callable[[], object]) -> None:
        self._lock = lock
        self._acquired = acquired

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired = bool(self._lock.acquire(blocking, timeout))
        if acquired:
            self._acquired()
        return acquired

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@contextlib.contextmanager
def running_in_locked_sections(within: list[Callable[[], object]]) -> Iterator[None]:
    """Make locks that run functions as finalizers might run, each of them once, when they were acquired: the
    locks of what is made in the block.
    """

    def run_next() -> None:
        if within:
            within.pop()()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Lock", "RLock"):
            make = getattr(threading, name)
            patch.setattr(threading, name, lambda make=make: HookedLock(make(), run_next))
        yield
