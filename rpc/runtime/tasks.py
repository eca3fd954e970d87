"""What the executor's threads run, and where one of them may wait for it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

Task = tuple[Callable[..., object], Any]
"""A function and its single argument."""

COMPLETION: Final = object()
"""The argument of tasks that complete a future. Such a task itself gives each callback a context and the
default modes. It may leave modes changed: the executor resets them before it begins a task of another kind.
"""


class TaskSource(Protocol):
    """Where one thread at a time may wait for a task that comes from elsewhere, such as a connection."""

    def claim(self, *, idle: bool) -> Any:
        """Take the place for the current thread, which is idle; returns what ``next_task`` takes, or None."""

    def next_task(self, claimed: Any, timeout: float | None, /) -> Task | None:
        """Having claimed the place: wait for a task, and give up the place. None after ``timeout`` seconds,
        when ``wake`` was called, and whenever else it likes.
        """

    def leave(self) -> None:
        """Give up the place, if the current thread has it."""

    def wake(self) -> None:
        """From any thread: end the wait of the one that has the place."""
