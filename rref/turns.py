"""Turns: so many requests at a time that use an object, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Turns"]


class Turns:
    """Who comes is started at once or when another has left. Nobody is, before ``open``. From any thread.

    Args:
        limit: how many may be at it at a time.
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._opened = False
        self._waiting: deque[Callable[[], object]] = deque()

    def open(self) -> None:
        """The object is there."""
        with self._lock:
            self._opened = True
        self._start()

    def enter(self, start: Callable[[], object]) -> None:
        """Have ``start`` called when it is its turn, on this thread or one that leaves; it may not block."""
        with self._lock:
            self._waiting.append(start)
        self._start()

    def leave(self) -> None:
        """One that was started has ended."""
        with self._lock:
            self._free += 1
        self._start()

    def _start(self) -> None:
        while True:
            with self._lock:
                if not self._opened or not self._free or not self._waiting:
                    return
                self._free -= 1
                start = self._waiting.popleft()
            start()
