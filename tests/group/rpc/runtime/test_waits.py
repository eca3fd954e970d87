"""Waits that last: the log says for whom."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

import rpc
from rpc.errors import RpcError, RpcTimeoutError
from rpc.runtime import notices
from tests.support.worker_process import WorkerProcess
from tests.support.workers import RunWorkers, Worker, current_worker

SOON = 0.1
"""Time in seconds after which waits are reported here."""


class _ToTheTest(logging.Handler):
    """Reports each line of the log as an event."""

    def emit(self, record: logging.LogRecord) -> None:
        current_worker().report("said", record.getMessage())


def hear(worker: WorkerProcess, *texts: str) -> str:
    """Waits until the worker's log has a line with all these, and returns it."""
    said: str = worker.wait_for("said")
    while not all(text in said for text in texts):
        said = worker.wait_for("said")
    return said


def told_soon(task: Callable[..., Any]) -> Callable[..., Any]:
    """The task of a worker whose log tells early."""

    @functools.wraps(task)
    def run(worker: Worker, **given: Any) -> Any:
        vars(notices)["FIRST_SECONDS"] = SOON
        logging.getLogger("rpc").addHandler(_ToTheTest())
        return task(worker, **given)

    return run


@told_soon
def meet(worker: Worker) -> None:
    if worker.rank == 1:
        worker.wait_for("go")
    with worker.group():
        pass


def test_init_rpc_says_who_is_missing(run_workers: RunWorkers) -> None:
    workers = run_workers.start(meet, 2)
    said = hear(workers[0], "'worker0' (rank 0, process", "Ranks that arrived: 0; missing: 1.")
    assert "Check that" not in said  # the others may be importing PyTorch
    hear(workers[0], "Ranks that arrived: 0; missing: 1. Check that every worker was started")
    workers.tell("go")
    workers.results()


def wait_at_gate() -> None:
    current_worker().wait_for("go")


@told_soon
def come_one_by_one(worker: Worker, wait: Callable[[], object]) -> None:
    worker.join()
    if worker.rank == 1:
        worker.wait_for("go")
    wait()
    if rpc.is_initialized():
        rpc.shutdown()


@pytest.mark.parametrize("waiting", [0, 2])
@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (rpc.shutdown, ["in shutdown for", "not in shutdown: worker 'worker1'"]),
        (rpc.barrier, ["' has waited", "in barrier", "for worker 'worker1'"]),
    ],
)
def test_shutdown_and_barrier_say_who_has_not_come(
    run_workers: RunWorkers, wait: Callable[[], object], said: list[str], waiting: int
) -> None:
    workers = run_workers.start(come_one_by_one, 3, kwargs={"wait": wait})
    hear(workers[waiting], *said)
    workers[1].tell("go")
    workers.results()


@told_soon
def leave_behind_a_call(worker: Worker) -> None:
    with worker.group():
        if worker.rank == 0:
            rpc.rpc_async("worker1", wait_at_gate)


def test_shutdown_says_which_functions_it_waits_for(run_workers: RunWorkers) -> None:
    workers = run_workers.start(leave_behind_a_call, 2)
    hear(workers[0], "waiting for: wait_at_gate on worker 'worker1'")
    hear(workers[1], "running: wait_at_gate for worker 'worker0'")
    workers[1].tell("go")
    workers.results()


def leave_when_told(worker: Worker) -> None:
    worker.wait_for("go")
    rpc.shutdown(graceful=False)


@told_soon
def wait_at_different_places(worker: Worker, in_barrier: int) -> None:
    worker.join()
    if worker.rank != in_barrier:
        rpc.shutdown()
        return
    threading.Thread(target=leave_when_told, args=(worker,)).start()
    with pytest.raises(RpcError):
        rpc.barrier()


@pytest.mark.parametrize("in_barrier", [0, 1])
def test_barrier_says_that_a_missing_worker_is_in_shutdown(run_workers: RunWorkers, in_barrier: int) -> None:
    """Nobody ends either wait: a call that the worker in shutdown serves may come to the barrier yet."""
    workers = run_workers.start(functools.partial(wait_at_different_places, in_barrier=in_barrier), 2)
    hear(workers[in_barrier], f"worker 'worker{1 - in_barrier}' (in shutdown)", "all must call it before")
    hear(workers[1 - in_barrier], "in shutdown for", f"worker{in_barrier}")
    workers[in_barrier].tell("go")
    workers.results()


@told_soon
def wait_for_a_while(worker: Worker) -> str:
    """The first gives up its barrier, and then needs the other, which is in shutdown meanwhile."""
    with worker.group():
        if worker.rank == 0:
            with pytest.raises(RpcTimeoutError, match=r"waiting for \['worker1'\]"):
                rpc.barrier(timeout=10 * SOON)
            return rpc.rpc_sync("worker1", str, args=("served",))
    return "left"


def test_barrier_with_a_timeout_against_shutdown_only_times_out(run_workers: RunWorkers) -> None:
    assert run_workers(wait_for_a_while, 2) == ["served", "left"]
