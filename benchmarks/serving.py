"""The main thread of a serving worker: runs the functions that it is given, until no more will come."""

from __future__ import annotations

import queue
from collections.abc import Callable

__all__ = ["finish", "run_on_main_thread", "serve"]

_tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()


def run_on_main_thread(task: Callable[[], None]) -> None:
    """From any thread: have the main thread run this."""
    _tasks.put(task)


def finish() -> None:
    """To be called remotely: let ``serve`` return."""
    _tasks.put(None)


def serve() -> None:
    """Run functions on the main thread."""
    while (task := _tasks.get()) is not None:
        task()
