"""Blocking waits: which threads may make them, and how Ctrl-C gets through.

A thread waits on a lock or an event of its own, which another thread releases or sets. A signal that arrives
after Python last looked and before the system call would not end the wait, so it is made in slices.
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
    """Why every blocking wait on the current thread raises ``BlockingCallError``; None where they do not."""
    runs_callees: bool = False
    """Whether the current thread is an agent's, and so runs what other workers have called."""


this_thread: Final = _ThisThread()


def check_may_block() -> None:
    """Raise ``BlockingCallError`` on a thread that must not block. Each blocking wait begins with this."""
    ensure_deferred()
    if this_thread.must_not_block is not None:
        raise BlockingCallError(this_thread.must_not_block)


def wait_for(lock: LockType, deadline: float = INFINITE) -> bool:
    """Acquire a lock that another thread releases; false if the deadline, on the monotonic clock, has passed.
    Ctrl-C interrupts.
    """
    return _in_slices(lock.acquire, deadline)


def wait_for_event(event: threading.Event, deadline: float = INFINITE) -> bool:
    """As ``wait_for``, for an event."""
    return _in_slices(event.wait, deadline)


@interruptible
def _in_slices(wait: Callable[..., bool], deadline: float) -> bool:
    while not wait(timeout=min(_SLICE_SECONDS, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline:
            return False
    return True


@interruptible
def wait_while(busy: Callable[[], bool], changed: threading.Condition, deadline: float) -> bool:
    """As ``wait_for``, for the end of what ``busy`` tells, with the lock of ``changed`` in hand."""
    while busy():
        left = deadline - monotonic()
        if left <= 0:
            return False
        changed.wait(min(left, _SLICE_SECONDS))
    return True
