"""Blocking waits: which threads may make them, and how ``KeyboardInterrupt`` ends them.

A thread waits on a lock or an event of its own, which another thread releases or sets. A signal that arrives
after Python's last check and before the system call would not end the wait, so each wait consists of short
ones.
"""

from __future__ import annotations

import threading
from _thread import LockType
from collections.abc import Callable
from time import monotonic
from typing import Final

from rpc.errors import BlockingCallError
from rpc.runtime.interrupts import ensure_deferred, interruptible

INFINITE: Final = float("inf")
_SLICE_SECONDS: Final = 0.5


class _ThisThread(threading.local):
    must_not_block: str | None = None
    """Why every blocking wait on the current thread raises ``BlockingCallError``, or None."""
    runs_callees: bool = False
    """Whether the current thread belongs to an agent, and so runs functions that other workers have
    called.
    """


this_thread: Final = _ThisThread()


def check_may_block() -> None:
    """Raise ``BlockingCallError`` on a thread that must not block. Called before each blocking wait."""
    ensure_deferred()
    if this_thread.must_not_block is not None:
        raise BlockingCallError(this_thread.must_not_block)


def wait_for(lock: LockType, deadline: float = INFINITE) -> bool:
    """Acquire a lock that another thread releases; false if the deadline, on the monotonic clock, has passed.
    ``KeyboardInterrupt`` interrupts it.
    """
    return _in_slices(lock.acquire, deadline)


def wait_for_event(event: threading.Event, deadline: float = INFINITE) -> bool:
    """Like ``wait_for``, for an event."""
    return _in_slices(event.wait, deadline)


@interruptible
def _in_slices(wait: Callable[..., bool], deadline: float) -> bool:
    while not wait(timeout=min(_SLICE_SECONDS, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline:
            return False
    return True


@interruptible
def wait_while(busy: Callable[[], bool], changed: threading.Condition, deadline: float) -> bool:
    """Like ``wait_for``, until ``busy`` returns false; the caller holds the lock of ``changed``."""
    while busy():
        left = deadline - monotonic()
        if left <= 0:
            return False
        changed.wait(min(left, _SLICE_SECONDS))
    return True
