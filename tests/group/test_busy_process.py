"""Calls go on at a good rate while the main thread computes: senders do not queue behind each other."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import rpc
from tests.support.serving import first_of
from tests.support.workers import RunWorkers, Worker

SENDERS = 4
CALLS = 500
IN_FLIGHT = 50


def echo(value: int) -> int:
    return value


def send_many(number: int) -> int:
    """Makes calls over the one connection that all share, a few dozen at a time."""
    answered = 0
    for _ in range(CALLS // IN_FLIGHT):
        futures = [rpc.rpc_async("worker1", echo, args=(number,)) for _ in range(IN_FLIGHT)]
        answered += sum(future.wait() == number for future in futures)
    return answered


def calls_per_second(busy: bool) -> float:
    """The rate of four senders, while the main thread waits for them or computes without a pause."""
    done = threading.Event()

    def run() -> int:
        try:
            with ThreadPoolExecutor(SENDERS) as senders:
                return sum(senders.map(send_many, range(SENDERS)))
        finally:
            done.set()

    with ThreadPoolExecutor(1) as runner:
        before = time.perf_counter()
        answered = runner.submit(run)
        total = 0
        while busy and not done.is_set():
            total += sum(range(100))
        assert answered.result() == SENDERS * CALLS
        return SENDERS * CALLS / (time.perf_counter() - before)


def measure_calm_and_busy(_: Worker) -> tuple[float, float]:
    send_many(0)
    return calls_per_second(busy=False), calls_per_second(busy=True)


def test_four_senders_and_a_busy_main_thread_make_no_convoy(run_workers: RunWorkers) -> None:
    """In a convoy each message waits for the interpreter in turn: 195 a second, measured, for 17,500."""
    calm, busy = first_of(run_workers, measure_calm_and_busy)
    print(f"{calm:.0f} calls/s with a calm main thread, {busy:.0f} with a busy one")
    assert busy > calm / 10
    assert busy > 500


def look_at_switch_interval(worker: Worker) -> list[float]:
    seen = [sys.getswitchinterval()]
    for options in ({}, {"switch_interval": 0.001}, {"switch_interval": None}):
        with worker.group(**options):
            seen.append(sys.getswitchinterval())
        seen.append(sys.getswitchinterval())
    return seen


def test_threads_switch_often_while_an_agent_runs(run_workers: RunWorkers) -> None:
    (seen,) = run_workers(look_at_switch_interval, 1)
    usual = seen[0]
    assert seen == [pytest.approx(each) for each in (usual, 0.0005, usual, 0.001, usual, usual, usual)]
