"""What a step costs: bytes that a worker sends, memory that it holds, and work of the driver."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks.spmd_cases import Decoder, Sizes, Step, least_bytes, on_device
from spmd.engine.driver.session import Session
from tests.support.spmd_simulated import SimulatedWorker, simulated_session

pytestmark = pytest.mark.logical_device

SIZES = Sizes(layers=1, width=64, batch=8, length=16, vocabulary=64)
MANY = 16


def warm(session: Session, step: Step) -> None:
    """Run a step until programs of it are made, linked, and rewritten by passes."""
    for _ in range(3):
        step()
        session.sync()


def held(worker: SimulatedWorker) -> int:
    assert worker.engine is not None
    storages = [each.untyped_storage() for each in worker.engine.values.values()]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("case", ["data", "model", "fsdp"])
def test_a_step_sends_hardly_more_than_it_must_and_a_worker_holds_its_share(case: str) -> None:
    with simulated_session(4) as (session, (worker, *_)):
        step = on_device(case, 4, SIZES)
        warm(session, step)
        worker.sent.clear()
        step()
        session.sync()
        assert sum(worker.sent.values()) <= 1.1 * least_bytes(case, 4, SIZES), worker.sent
        if case == "fsdp":  # of parameters, gradients and two states of the optimizer
            all_bytes = 4 * sum(each.numel() for each in Decoder(SIZES).parameters())
            assert held(worker) <= 4 * all_bytes / 4 + 4096  # and what has a number or two


def calls_of_a_step(case: str, workers: int, layers: int) -> int:
    """Calls of functions in the driver, in steps that have been there before."""
    with simulated_session(workers, computes=False) as (session, _):
        step = on_device(case, workers, Sizes(layers=layers, width=32, batch=MANY, length=32, vocabulary=32))
        warm(session, step)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            step()
            session.sync()
        finally:
            sys.setprofile(None)
        return calls


def test_what_the_driver_does_more_for_many_workers_is_the_same_for_longer_programs() -> None:
    short, long = (
        calls_of_a_step("fsdp", MANY, layers) - calls_of_a_step("fsdp", 2, layers) for layers in (1, 2)
    )
    assert long - short < MANY  # not one call more for each worker: messages are as many, and as short
    assert short < 60 * MANY  # messages, and parts of two tensors in them
