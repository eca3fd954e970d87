"""Workers that do one after another what the test tells them, for tests in which the order matters.

Example::

    workers = start_followers(run_workers, 3)
    ask(workers[0], make_object_on, "worker1")
    workers[2].kill()
    ask(workers[0], use_object)
    dismiss(workers)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.support.workers import TIME_LIMIT, RunWorkers, Worker, WorkerProcess, Workers


def follow_orders(worker: Worker, **options: Any) -> None:
    """Joins the group and runs what the test asks for; leaves gracefully when dismissed."""
    with worker.group(**options):
        worker.report("ready")
        while (order := worker.wait_for("order")) is not None:
            worker.report("done", order())


def start_followers(
    run_workers: RunWorkers, size: int, time_limit: float = TIME_LIMIT, **options: Any
) -> Workers:
    """Workers in one group that wait for orders."""
    workers = run_workers.start(follow_orders, size, kwargs=options, time_limit=time_limit)
    workers.wait_for("ready")
    return workers


def add_follower(workers: Workers, **options: Any) -> WorkerProcess:
    """One more in a dynamic group; ``name`` and ``rank`` may be among the options."""
    place = {key: options.pop(key) for key in ("name", "rank") if key in options}
    worker = workers.add(follow_orders, kwargs=options, **place)
    worker.wait_for("ready")
    return worker


def ask(worker: WorkerProcess, function: Callable[..., Any], *args: Any) -> Any:
    """Has a worker run a function and returns its value."""
    worker.tell("order", functools.partial(function, *args))
    return worker.wait_for("done")


def dismiss(workers: Workers) -> None:
    """Lets all that are still there leave, and waits for their end."""
    for worker in workers:
        if not worker.death_intended and not worker.ended:
            worker.tell("order", None)
    workers.results()
