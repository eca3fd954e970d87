"""Calls while something else computes: the main thread of a process, for whose interpreter they wait, or
other processes, for whose cores they do.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks import serving, turns
from benchmarks.calls import nothing
from benchmarks.others import busy_processes
from benchmarks.workload import CALLEE, Bar, Workload

__all__ = ["workloads"]

_PERIOD_SECONDS = 0.02
_CALLS = 80
_OTHERS: Final = 8
"""Number of processes that compute beside the workers."""
_OTHERS_SECONDS: Final = 60
"""Time in seconds after which such a process ends by itself."""
_BATCH_SECONDS: Final = 0.5
_BATCHES: Final = 10

_stop = threading.Event()


def _compute() -> None:
    """The main thread's work until it is told to stop."""
    value = 1
    while not _stop.is_set():
        for _ in range(1000):
            value = value * 1103515245 % 2147483648


def _begin_to_compute() -> None:
    _stop.clear()
    serving.run_on_main_thread(_compute)


def _stop_computing() -> None:
    _stop.set()


def _spaced_calls(rpc: Any, calls: int) -> list[float]:
    """The time of calls at random intervals: back to back, the RPC threads would keep the interpreter."""
    times = []
    for _ in range(calls):
        time.sleep(random.uniform(0, _PERIOD_SECONDS))
        begin = time.perf_counter()
        rpc.rpc_sync(CALLEE, nothing)
        times.append(time.perf_counter() - begin)
    return times


def _callee(rpc: Any) -> float:
    """How long a call takes to a worker whose main thread computes."""
    rpc.rpc_sync(CALLEE, _begin_to_compute)
    try:
        _spaced_calls(rpc, 5)
        return 1e3 * statistics.median(_spaced_calls(rpc, _CALLS))
    finally:
        rpc.rpc_sync(CALLEE, _stop_computing)


def _beside_others(rpc: Any) -> float:
    """How long a null call takes beside other processes, the median over batches."""
    rpc.rpc_sync(CALLEE, nothing)
    times = []
    for _ in range(_BATCHES):
        turns.pass_on()
        with busy_processes(_OTHERS, _OTHERS_SECONDS):
            rpc.rpc_sync(CALLEE, nothing)
            made, begin = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - begin) < _BATCH_SECONDS:
                rpc.rpc_sync(CALLEE, nothing)
                made += 1
            times.append(elapsed / made)
    return 1e6 * statistics.median(times)


def workloads() -> Iterator[Workload]:
    """All in which something else computes."""
    yield Workload("busy-callee", "callee's main thread computing", "ms", _callee, Bar(0.15), part="busy")
    title = f"beside {_OTHERS} busy processes"
    yield Workload("busy-machine", f"null call {title}", "µs", _beside_others, Bar(0.6), part="busy")
