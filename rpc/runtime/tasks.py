"""What the executor's threads run, and where one of them may wait for it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Station", "Task"]

Task = tuple[Callable[..., object], Any]
"""A function and its single argument."""


class Station(Protocol):
    """Where one thread at a time may wait for a task that comes from elsewhere."""

    def claim(self) -> bool:
        """Take the place for the current thread, which may have it already; false if it cannot have it."""

    def next_task(self, timeout: float | None) -> Task | None:
        """Having claimed the place: wait for a task, and give up the place.

        Returns:
            None after ``timeout`` seconds, or when ``release`` was called, or whenever else it likes: at once
            if the place was lost again.
        """

    def leave(self) -> None:
        """Give up the place, if the current thread has it."""

    def release(self) -> None:
        """From any thread: end the wait of the one that has the place."""
