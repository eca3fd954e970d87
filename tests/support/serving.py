"""Runs in which one worker acts and the others serve it: the shape of most tests of calls.

Example::

    def test_a_worker_can_be_called(run_workers: RunWorkers) -> None:
        assert first_of(run_workers, lambda worker: rpc.rpc_sync("worker1", os.getpid)) != os.getpid()
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from tests.support.workers import RunWorkers, Task, Worker, current_worker

__all__ = ["Gate", "first_of", "in_group", "open_gate", "report", "serve", "wait_at_gate"]

WAIT_SECONDS = 20.0
"""Longer than anything here takes, shorter than a run's time limit: what times out says what it was."""


def in_group(task: Task, **options: Any) -> Task:
    """``task(worker, *args)`` inside ``worker.group()``; the group is left gracefully when it is done."""

    @functools.wraps(task)
    def run(worker: Worker, args: tuple[Any, ...] = ()) -> Any:
        with worker.group(**options):
            return task(worker, *args)

    return run


def serve(worker: Worker, **options: Any) -> None:
    """Does what others ask, until all are done."""
    with worker.group(**options):
        pass


def first_of(run_workers: RunWorkers, task: Task, *args: Any, world_size: int = 2, **options: Any) -> Any:
    """What ``task(worker, *args)`` returns in ``worker0``, in a group where all others serve."""
    first = functools.partial(in_group(task, **options), args=args)
    others = [functools.partial(serve, **options)] * (world_size - 1)
    return run_workers([first, *others])[0]


class Gate:
    """Where the functions that a worker runs for others wait until the test lets them go on."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        """Lets everybody through, now and later."""
        self._open.set()

    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._open.is_set()

    def wait(self) -> None:
        """Waits until it is open."""
        assert self._open.wait(WAIT_SECONDS), "nobody opened the gate"


_gates: dict[str, Gate] = {}


def _gate(name: str) -> Gate:
    return _gates.setdefault(name, Gate())  # in one operation: several threads may come first


def wait_at_gate(name: str = "", value: Any = None) -> Any:
    """To be called remotely: reports ``"at the gate"``, waits until it is opened here, returns ``value``."""
    current_worker().report("at the gate", name)
    _gate(name).wait()
    return value


def open_gate(name: str = "") -> None:
    """To be called remotely: lets those through who wait there."""
    _gate(name).open()


def report(event: str, value: Any = None) -> None:
    """To be called remotely: the worker that runs this reports to the test."""
    current_worker().report(event, value)
