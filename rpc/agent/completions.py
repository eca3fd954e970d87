"""Tasks for executor threads; and of those that no thread will run any more, the futures to complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rpc.agent.futures import Future
from rpc.runtime.executor import Executor, Task

__all__ = ["Completions", "do_all"]


class Completions:
    """Has tasks run, and futures completed, on executor threads. From any thread."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def run_soon(self, tasks: Sequence[Task]) -> None:
        """Run tasks on executor threads; when these have ended, only futures are completed still."""
        if not self._executor.submit_batch(tasks):
            _complete(tasks)

    def complete_soon(self, *futures: Future[Any]) -> None:
        """Have futures completed whose calls have ended."""
        if futures:
            self.run_soon([(future.complete, None) for future in futures])

    def stop(self, timeout: float) -> None:
        """End the executor; what it has not begun is dropped, but futures are completed."""
        dropped = self._executor.drop_backlog()
        try:
            self._executor.stop(timeout=timeout)
        finally:
            _complete(dropped)


def _complete(tasks: Sequence[Task]) -> None:
    do_all(
        *(
            functools.partial(function, argument)
            for function, argument in tasks
            if isinstance(getattr(function, "__self__", None), Future)
        )
    )


def do_all(*steps: Callable[[], object]) -> None:
    """Do one step after the other, also when one raises; what was raised is raised at the end."""
    with ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)
