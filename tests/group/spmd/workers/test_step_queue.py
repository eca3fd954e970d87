"""A worker's queue of steps: their order, their context, and their end."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import rpc
from spmd.workers.step_queue import StepQueue
from tests.support.serving import in_standing_group
from tests.support.workers import RunWorkers, Worker

USER: contextvars.ContextVar[str] = contextvars.ContextVar("USER", default="nobody")


@dataclass
class Step:
    sequence: int
    do: Callable[[], Any] = lambda: None


def queue(driver: str = "worker0", **options: Any) -> StepQueue:
    return StepQueue(
        lambda step: step.do(), driver, lambda reason: None, lambda: RuntimeError("ended"), **options
    )


@in_standing_group(1)
def test_steps_are_done_in_their_order_and_in_the_context_of_their_callers() -> None:
    done: list[tuple[int, str]] = []
    steps = queue()
    for number in (2, 1, 0):
        token = USER.set(f"user {number}")
        future = steps.put(Step(number, lambda number=number: done.append((number, USER.get()))))  # type: ignore[misc]
        USER.reset(token)
        if number == 2:
            last = future
    last.wait()
    assert done == [(0, "user 0"), (1, "user 1"), (2, "user 2")]
    steps.close()


@in_standing_group(1)
def test_a_step_that_will_not_come_is_not_waited_for() -> None:
    steps = queue()
    assert steps.put(Step(0, lambda: "done")).wait() == "done"
    steps.skip(0)  # it has come
    after = steps.put(Step(3, lambda: "after"))
    steps.skip(2)
    steps.skip(1)
    assert after.wait() == "after"
    steps.skip(4)
    steps.skip(6)
    steps.close()
    steps.skip(5)


@in_standing_group(1)
def test_a_step_that_ends_its_thread_ends_itself_alone() -> None:
    steps = queue()
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        steps.put(Step(0, lambda: sys.exit(3))).wait()
    assert steps.put(Step(1, lambda: "done")).wait() == "done"
    steps.close()


@in_standing_group(1)
def test_a_step_leaves_no_mode_in_force_for_the_next() -> None:
    steps = queue()
    steps.put(Step(0, lambda: torch.set_grad_enabled(False))).wait()
    assert steps.put(Step(1, torch.is_grad_enabled)).wait() is True
    steps.close()


@in_standing_group(1)
def test_an_error_ends_its_step_alone_and_what_comes_after_the_end_says_so() -> None:
    released: list[str] = []
    steps = queue(release=lambda: released.append("now"))

    def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        steps.put(Step(0, fail)).wait()
    early = steps.put(Step(2))
    assert steps.put(Step(1, lambda: "done")).wait() == "done"
    early.wait()
    early = steps.put(Step(9))
    steps.close()
    steps.close()
    assert released == ["now"]
    for future in (early, steps.put(Step(3))):
        with pytest.raises(RuntimeError, match="ended"):
            future.wait()


def drive(worker: Worker) -> None:
    worker.join()
    worker.report("here")
    worker.wait_for("never")


def serve(worker: Worker) -> str:
    worker.join()
    rpc.rpc_sync("worker0", int)  # a driver is connected
    aborted: Any = rpc.Future()
    steps = StepQueue(lambda step: None, "worker0", aborted.set_result, lambda: RuntimeError("ended"))
    early = steps.put(Step(1))
    worker.report("waits")
    with pytest.raises(RuntimeError, match="ended"):
        early.wait()
    assert aborted.wait()
    rpc.shutdown(graceful=False)
    return "ended"


def test_the_steps_of_a_driver_that_is_lost_end(run_workers: RunWorkers) -> None:
    workers = run_workers.start([drive, serve])
    workers[0].wait_for("here")
    workers[1].wait_for("waits")
    workers[0].kill()
    assert workers[1].result() == "ended"
