"""Many cases in one session of SPMD mode: a driver and four workers, forked once for all tests of a folder.

A test is written as the driver's program::

    pytestmark = pytest.mark.processes

    @driven
    def test_a_mark_is_known_at_once() -> None:
        t = torch.ones(4).to(spmd.device())
        ...

and runs in the driver, the fixture of its folder; what it raises fails the test.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import spmd
from tests.support import leftovers
from tests.support.workers import RunWorkers, Worker, WorkerProcess, fork_server_key

__all__ = ["WORKERS", "drive", "driven"]

WORKERS = 4
_TIME_LIMIT = 120.0  # for each case


def driven(body: Callable[..., None]) -> Callable[..., None]:
    """A test whose body runs in the driver, with the arguments that parameters give it."""

    def run(driver: WorkerProcess, **arguments: Any) -> None:
        __tracebackhide__ = True
        driver.restart_clock()
        driver.tell("case", (body.__module__, body.__name__, arguments))
        said = driver.wait_for("done")
        if said is not None:
            pytest.fail(said, pytrace=False)

    functools.update_wrapper(run, body)
    run.__signature__ = _with_driver(body)  # type: ignore[attr-defined]
    return run


def _with_driver(body: Callable[..., None]) -> Any:
    import inspect

    signature = inspect.signature(body)
    first = inspect.Parameter("driver", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def drive(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """The process that cases run in."""
    runner = RunWorkers(request.config.stash[fork_server_key], tmp_path_factory.mktemp("spmd"))
    workers = runner.start([_drive] + [_serve] * WORKERS, time_limit=_TIME_LIMIT)
    workers[0].wait_for("ready")
    pids = {worker.pid for worker in workers}
    leftovers.SERVERS.update(pids)  # which are there while other tests begin and end
    yield workers[0]
    workers.restart_clock()
    workers[0].tell("case", None)
    workers.results()
    leftovers.SERVERS.difference_update(pids)
    runner.close()


def _drive(worker: Worker) -> None:
    with worker.group():
        spmd.use_spmd()
        worker.report("ready")
        while (case := worker.wait_for("case")) is not None:
            module, name, arguments = case
            body = getattr(importlib.import_module(module), name).__wrapped__
            torch.manual_seed(0)
            try:
                body(**arguments)
                spmd.sync()
                spmd.set_global_mesh(None)
                worker.report("done")
            except BaseException:
                worker.report("done", traceback.format_exc())
        spmd.shutdown()


def _serve(worker: Worker) -> None:
    with worker.group():
        pass
