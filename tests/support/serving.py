"""Runs in which one worker acts and the others serve it: the shape of most tests of calls.

Example::

    @in_worker0(world_size=3)
    def test_a_worker_can_be_called() -> None:
        assert rpc.rpc_sync("worker1", os.getpid) != os.getpid()
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from tests.support.standing import Enter, Shared
from tests.support.workers import RunWorkers, Task, Worker, current_worker

WAIT_SECONDS = 40.0
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


Body = Callable[..., None]


def in_worker0(world_size: int = 2, **options: Any) -> Callable[[Body], Body]:
    """Makes a test of a function that runs in ``worker0``, in a group where all others serve.

    The options are those of ``Worker.group``. The function is given what the test is parametrized by, and
    the worker if it has a parameter of that name.
    """
    return _made(lambda run_workers, task: first_of(run_workers, task, world_size=world_size, **options))


def in_standing_group(world_size: int = 2, **options: Any) -> Callable[[Body], Body]:
    """Like ``in_worker0``, in a group that stays for all such tests of the module with the same options.
    Gates are closed before each; ``tests.support.standing`` says what they must not depend on.
    """
    enter = entering(**options)
    return _made(lambda run_workers, task: run_workers(Shared(enter, task, _close_gates), world_size))


@functools.cache
def entering(**options: Any) -> Enter:
    """What a group with these options is entered by; the same for the same options, which can be hashed."""
    return functools.partial(Worker.group, **options) if options else Worker.group


def in_standing(enter: Enter, world_size: int) -> Callable[[Body], Body]:
    """Makes a test of a function that runs in each of some workers, which stay in what ``enter`` makes."""
    return _made(lambda run_workers, task: run_workers(Shared(enter, task), world_size))


def _close_gates(_: Worker) -> None:
    _gates.clear()


def in_all(world_size: int = 2, **options: Any) -> Callable[[Body], Body]:
    """Makes a test of a function that runs in each worker of a group."""
    return _made(lambda run_workers, task: run_workers(in_group(task, **options), world_size))


def in_processes(count: int) -> Callable[[Body], Body]:
    """Makes a test of a function that runs in some processes, which are in no group."""
    return _made(lambda run_workers, task: run_workers(task, count))


def _made(run: Callable[[RunWorkers, Task], object]) -> Callable[[Body], Body]:
    """What makes a test of a body: it runs the body as a task of workers."""

    def decorate(body: Body) -> Body:
        def test(run_workers: RunWorkers, **given: Any) -> None:
            run(run_workers, task_of(body, given))

        return as_test(test, body)

    return decorate


def as_test(test: Body, body: Body, *fixtures: str) -> Body:
    """``test``, with the name and the parameters of ``body``; it uses ``run_workers`` and ``fixtures``."""
    parameters = [each for each in inspect.signature(body).parameters.values() if each.name != "worker"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(each, kind) for each in ("run_workers", *fixtures)]
    test.__module__, test.__name__, test.__doc__ = body.__module__, body.__name__, body.__doc__
    test.__signature__ = inspect.Signature([*given, *parameters])  # type: ignore[attr-defined]
    test.body = body  # type: ignore[attr-defined]
    return test


def task_of(body: Body, given: dict[str, Any]) -> Task:
    """What a worker runs: the body of a test, with what that is parametrized by."""
    task: Any = functools.partial(_in_worker, body.__module__, body.__name__, given)
    task.__module__ = body.__module__  # which workers are forked with, so that not each imports it
    return task  # type: ignore[no-any-return]


def _in_worker(module: str, name: str, given: dict[str, Any], worker: Worker) -> None:
    """Runs what a test is made of; found by its name, so that it uses that module's globals."""
    body: Body = getattr(importlib.import_module(module), name).body
    _close_gates(worker)
    if "worker" in inspect.signature(body).parameters:
        given = {"worker": worker, **given}
    body(**given)


class Gate:
    """Where the functions that a worker runs for others wait until the test lets them go on."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._arrivals = threading.Semaphore(0)

    def open(self) -> None:
        """Lets everybody through, now and later."""
        self._open.set()

    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._open.is_set()

    def wait(self) -> None:
        """Waits until it is open."""
        self._arrivals.release()
        assert self._open.wait(WAIT_SECONDS), "nobody opened the gate"

    def wait_for_arrivals(self, count: int) -> None:
        """Waits until ``count`` more threads have come to the gate."""
        for arrived in range(count):
            assert self._arrivals.acquire(timeout=WAIT_SECONDS), f"{arrived} of {count} came to the gate"


_gates: dict[str, Gate] = {}


def _gate(name: str) -> Gate:
    return _gates.setdefault(name, Gate())  # in one operation: several threads may come first


def wait_at_gate(name: str = "", value: Any = None) -> Any:
    """To be called remotely: reports ``"at the gate"``, waits until it is opened here, returns ``value``."""
    current_worker().report("at the gate", name)
    _gate(name).wait()
    return value


def wait_for_arrivals(count: int, name: str = "") -> None:
    """To be called remotely: waits until ``count`` more threads have come to that gate."""
    _gate(name).wait_for_arrivals(count)


def open_gate(name: str = "") -> None:
    """To be called remotely: lets those through who wait there."""
    _gate(name).open()


def report(event: str, value: Any = None) -> None:
    """To be called remotely: the worker that runs this reports to the test."""
    current_worker().report(event, value)
