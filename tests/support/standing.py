"""Workers that stay for all tests of a module which can share them, so that not each test starts its own.

``run_workers`` runs a :class:`Shared` task in the workers that earlier tests of the module have left, if
there are as many and they are in the same. They end with the module, and after a test that fails in them.
Private globals of the test's module that are lists, dictionaries, sets or deques have their first content
again before each test. What a test changes besides in its workers, later ones find: it must not depend on
what is counted or cached there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.support import default_device, leftovers
from tests.support.worker_context import Worker, seed

if TYPE_CHECKING:
    from tests.support.workers import RunWorkers, Task, Workers

__all__ = ["Enter", "Shared", "Standing"]

Enter = Callable[[Worker], AbstractContextManager[Any]]

_CONTAINERS: Final = (list, dict, set, deque, defaultdict)
"""Types of globals that are the same before each test."""


@dataclass(frozen=True)
class Shared:
    """A task for workers that stay.

    Attributes:
        enter: makes what the workers are in from the first test to the last, such as a group.
        task: what each runs, or the first, if ``others`` is there.
        others: what the others run before.
    """

    enter: Enter
    task: Task
    others: Task | None = None


class Standing:
    """The workers that stay, by what they are in and by their number."""

    def __init__(self, make_runner: Callable[[], RunWorkers]) -> None:
        self._make_runner = make_runner
        self._runners: dict[tuple[Enter, int], tuple[RunWorkers, Workers]] = {}

    def run(
        self,
        shared: Shared,
        world_size: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        time_limit: float,
    ) -> list[Any]:
        """Runs the task; returns the results by rank.

        Raises:
            WorkersFailed: a worker raised, crashed or hung.
        """
        __tracebackhide__ = True
        workers = self._workers(shared, world_size)
        workers.restart_clock(time_limit)
        tasks = [shared.task] * world_size if shared.others is None else [shared.task]
        try:
            for worker in workers[len(tasks) :]:
                worker.tell("task", (shared.others, (), {}))
            results = [worker.wait_for("done") for worker in workers[len(tasks) :]]
            for worker, task in zip(workers, tasks, strict=False):
                worker.tell("task", (task, args, kwargs or {}))
            results[:0] = [worker.wait_for("done") for worker in workers[: len(tasks)]]
        except BaseException:
            self._end(shared.enter, world_size)
            raise
        if default_device.MODE:  # each test has its own simulated accelerators
            self.close()
        return results

    def _workers(self, shared: Shared, world_size: int) -> Workers:
        key = shared.enter, world_size
        if key not in self._runners:
            stand: Any = functools.partial(_stand, shared.enter, shared.task.__module__)
            stand.__module__ = shared.task.__module__  # which workers are forked with
            runner = self._make_runner()
            self._runners[key] = runner, runner.start(stand, world_size)
            leftovers.SERVERS.update(worker.pid for worker in self._runners[key][1])
        return self._runners[key][1]

    def close(self) -> None:
        """Lets all workers end, which must leave nothing behind."""
        with contextlib.ExitStack() as stack:
            for key, (_, workers) in self._runners.items():
                workers.restart_clock()
                workers.tell("task")
                stack.callback(self._end, *key)
                stack.callback(workers.results)

    def _end(self, enter: Enter, world_size: int) -> None:
        runner, workers = self._runners.pop((enter, world_size))
        leftovers.SERVERS.difference_update(worker.pid for worker in workers)
        runner.close()


def _stand(enter: Enter, module: str, worker: Worker) -> None:
    names = vars(sys.modules[module])
    own = [value for name, value in names.items() if name[0] == "_" != name[1] and type(value) in _CONTAINERS]
    begun = [(each, each.copy()) for each in own]
    with enter(worker):
        for number in itertools.count():
            if (given := worker.wait_for("task")) is None:
                return
            task, args, kwargs = given
            seed(worker.rank)
            for container, content in begun:
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(content)
            folder = worker.folder / str(number)  # the same for all, and empty
            folder.mkdir(exist_ok=True)
            os.chdir(folder)
            worker.report("done", default_device.to_cpu(task(worker, *args, **kwargs)))
