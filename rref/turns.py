"""Turns: limit how many requests use an object at a time, and start them in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Turns"]


class Turns:
    """Starts each request at once, or when an earlier one has ended; none before ``open``. From any thread.

    Args:
        limit: maximum number of requests that run at a time.
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._opened = False
        self._waiting: deque[Callable[[], object]] = deque()

    def open(self) -> None:
        """Start requests from now on: the object is there."""
        with self._lock:
            self._opened = True
        self._start()

    def enter(self, start: Callable[[], object]) -> None:
        """Have ``start`` called when its turn comes, on this thread or one that calls ``leave``; it must not
        block.
        """
        with self._lock:
            self._waiting.append(start)
        self._start()

    def leave(self) -> None:
        """End the turn of a request that was started."""
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
