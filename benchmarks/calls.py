"""Small calls: how long one takes, and how many there can be."""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import turns
from benchmarks.workload import CALLEE, Bar, Workload, seconds_per_call

__all__ = ["echo", "nothing", "workloads"]

_GRADIENT_NUMBERS = 4096
_PUSHES = 150
_TRAINERS = 8
_TRACED_BATCHES = 7
_TRACED_CALLS = 2000

_total = torch.zeros(_GRADIENT_NUMBERS)


def nothing() -> None:
    """The null call."""


def echo(value: Any) -> Any:
    """There and back."""
    return value


def _null_call(rpc: Any) -> float:
    return 1e6 * seconds_per_call(lambda: rpc.rpc_sync(CALLEE, nothing))


def _traced(rpc: Any) -> float:
    """The time of a null call while all workers are traced, over that of one while they are not."""

    def batch(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            rpc.rpc_sync(CALLEE, nothing)
        return time.perf_counter() - begin

    ratios = []
    batch(_TRACED_CALLS)
    with tempfile.TemporaryDirectory(prefix="farcall-traced-") as folder:
        for _ in range(_TRACED_BATCHES):
            turns.pass_on()
            before = batch(_TRACED_CALLS)
            with rpc.trace(f"{folder}/trace.json"):
                traced = batch(_TRACED_CALLS)
            after = batch(_TRACED_CALLS)
            ratios.append(2 * traced / (before + after))
    return statistics.median(ratios)


def _small_tensor(rpc: Any) -> float:
    tensor = torch.randn(16)
    return 1e6 * seconds_per_call(lambda: rpc.rpc_sync(CALLEE, echo, args=(tensor,)))


def _remote_to_here(rpc: Any) -> float:
    return 1e6 * seconds_per_call(lambda: rpc.remote(CALLEE, echo, args=(1,)).to_here())


def _fetch(rpc: Any) -> float:
    reference = rpc.remote(CALLEE, echo, args=(torch.ones(16),))
    return 1e6 * seconds_per_call(reference.to_here)


def _window(rpc: Any, in_flight: int = 1000) -> float:
    def round_trip() -> None:
        futures = [rpc.rpc_async(CALLEE, nothing) for _ in range(in_flight)]
        for future in futures:
            future.wait()

    return in_flight / seconds_per_call(round_trip)


def _add(gradient: torch.Tensor) -> None:
    _total.add_(gradient)


def _push(module: str, count: int) -> None:
    """On a trainer: gradients for worker 0, one after another."""
    rpc = importlib.import_module(module)
    gradient = torch.ones(_GRADIENT_NUMBERS)
    for _ in range(count):
        rpc.rpc_sync("worker0", _add, args=(gradient,))


def _many_to_one(rpc: Any) -> float:
    """Gradients per second that worker 0 takes from all trainers together."""

    def push() -> None:
        futures = [
            rpc.rpc_async(f"worker{trainer}", _push, args=(rpc.__name__, _PUSHES))
            for trainer in range(1, _TRAINERS + 1)
        ]
        for future in futures:
            future.wait()

    return _TRAINERS * _PUSHES / seconds_per_call(push)


def _idle_cpu(rpc: Any, seconds: float = 2.0) -> float:
    """The share of one core, in percent, that the busier of the two idle workers uses."""
    time.sleep(0.2)  # whatever came before has settled
    there, here, begin = rpc.rpc_sync(CALLEE, time.process_time), time.process_time(), time.perf_counter()
    time.sleep(seconds)
    here, elapsed = time.process_time() - here, time.perf_counter() - begin
    there = rpc.rpc_sync(CALLEE, time.process_time) - there
    return float(100 * max(here, there) / elapsed)


def workloads() -> Iterator[Workload]:
    """All that are about small calls."""
    yield Workload("null", "null rpc_sync", "µs", _null_call, Bar(0.20))
    yield Workload("traced", "null rpc_sync while traced", "x", _traced, Bar(1.10, absolute=True), own=True)
    yield Workload("small", "small tensor there and back", "µs", _small_tensor, Bar(0.22))
    yield Workload("remote", "remote(...).to_here()", "µs", _remote_to_here, Bar(0.30))
    yield Workload("fetch", "to_here() of a small tensor", "µs", _fetch)
    yield Workload("window", "1,000 rpc_async in flight", "calls/s", _window, Bar(8, at_least=True))
    yield Workload(
        "server-8",
        f"16 KB gradients of {_TRAINERS} trainers",
        "calls/s",
        _many_to_one,
        Bar(2, at_least=True),
        workers=_TRAINERS + 1,
    )
    yield Workload("idle", "idle agent", "% CPU", _idle_cpu, Bar(0.5, absolute=True))
