"""Blocking waits: which threads may make them, and how the exception of a signal handler ends them.

A thread waits on a lock of its own, which another thread releases, and sleeps in that lock only. There an
exception leaves nothing undone. Python's own events, conditions and futures would keep their internal locks
if it came right after they have acquired one. A signal that arrives after Python's last check and before the
system call would not end the wait, so each wait consists of short ones.
"""

from __future__ import annotations

import signal
import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from rpc.errors import BlockingCallError
from rpc.runtime.interrupts import ensure_deferred, interruptible, protected

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


@interruptible
def wait_for(lock: LockType, deadline: float = INFINITE) -> bool:
    """Acquire a lock that another thread releases; false if the deadline, on the monotonic clock, has passed.
    A signal handler may interrupt it.
    """
    while not lock.acquire(timeout=min(_SLICE_SECONDS, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline:
            return False
    return True


class Event:
    """Like ``threading.Event``, for ``wait_for_event``. From any thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[LockType] = []

    def is_set(self) -> bool:
        return self._is_set

    @protected
    def set(self) -> None:
        self._is_set = True
        with suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def clear(self) -> None:
        self._is_set = False


@protected
def wait_for_event(event: Event, deadline: float = INFINITE) -> bool:
    """Like ``wait_for``, until an event is set."""
    lock = allocate_lock()
    lock.acquire()
    event._waiting.append(lock)
    try:
        return event._is_set or wait_for(lock, deadline)
    finally:
        with suppress(ValueError):  # it has been set
            event._waiting.remove(lock)


def event_of_signals(*numbers: int) -> Event:
    """Return an event that these signals set from now on. A handler that ran in the middle of the wait for an
    event of ``threading`` could not set that, as the wait holds its lock. For the main thread.
    """
    event = Event()
    for number in numbers:
        signal.signal(number, lambda *_: event.set())
    return event


class Condition(threading.Condition):
    """A condition for ``wait_while``: a signal handler may interrupt its ``wait`` only while that sleeps."""

    # What ``threading.Condition`` is made of, which typeshed omits.
    _waiters: Any
    _release_save: Any
    _acquire_restore: Any

    @protected
    def wait(self, timeout: float | None = None) -> bool:
        lock = allocate_lock()
        lock.acquire()
        self._waiters.append(lock)
        held = self._release_save()
        try:
            return wait_for(lock, INFINITE if timeout is None else monotonic() + timeout)
        finally:
            self._acquire_restore(held)
            with suppress(ValueError):  # it was notified
                self._waiters.remove(lock)


@protected
def wait_while(busy: Callable[[], bool], changed: Condition, deadline: float) -> bool:
    """Like ``wait_for``, until ``busy`` returns false; the caller holds the lock of ``changed``."""
    while busy():
        left = deadline - monotonic()
        if left <= 0:
            return False
        changed.wait(left)
    return True
