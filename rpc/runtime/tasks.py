"""Tasks of the executor's threads, and sources of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

Task = tuple[Callable[..., object], Any]
"""A function and its single argument."""

COMPLETION: Final = object()
"""The argument of tasks that complete a future. Such a task itself gives each callback a context and the
default modes. It may leave modes changed: the executor resets them before it starts a task of another kind.
"""


class TaskSource(Protocol):
    """A source, such as a connection, at which one thread at a time may wait for a task."""

    def claim(self, *, idle: bool) -> Any:
        """Take the place for the current thread, which is idle; returns what ``next_task`` takes, or None."""

    def next_task(self, claimed: Any, timeout: float | None, /) -> Task | None:
        """Wait for a task, having claimed the place, and then give up the place. Returns None after
        ``timeout`` seconds, when ``wake`` was called, and possibly at other times.
        """

    def leave(self) -> None:
        """Give up the place, if the current thread has it."""

    def wake(self) -> None:
        """End the wait of the thread that has the place. From any thread."""
