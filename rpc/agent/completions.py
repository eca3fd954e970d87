"""Executor threads, which run tasks and complete futures."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rpc.agent.futures import Future
from rpc.runtime.executor import Executor
from rpc.runtime.tasks import Task

__all__ = ["Completions"]


class Completions:
    """Has tasks run, and futures completed, on executor threads. From any thread."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def run_soon(self, tasks: Sequence[Task]) -> None:
        """Run tasks on executor threads; after their end, only futures are completed."""
        if not self.executor.submit_batch(tasks):
            self._complete(tasks)

    def stop(self, timeout: float) -> None:
        """End the executor; tasks that have not begun are dropped, but futures are completed."""
        dropped = self.executor.drop_backlog()
        try:
            self.executor.stop(timeout=timeout)
        finally:
            self._complete(dropped)

    def _complete(self, tasks: Sequence[Task]) -> None:
        with contextlib.ExitStack() as all_of_them:  # even if the callbacks of one raise
            for function, argument in reversed(tasks):
                if isinstance(getattr(function, "__self__", None), Future):
                    all_of_them.callback(function, argument)
