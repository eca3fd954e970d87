"""What is measured. A workload is one function of the RPC module, since both have the same names.

It runs on worker 0 of two and calls worker 1, which serves. Each returns one number; the smaller or the
larger is the better, as the workload says.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CALLEE", "WORKLOADS", "Bar", "Workload"]

CALLEE = "worker1"

_BATCHES = 10
_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True)
class Bar:
    """What is asked of farcall's number: at most, or at least, so much.

    Attributes:
        limit: the limit, of the ratio to the other's number, or of the number itself if ``absolute``.
    """

    limit: float
    at_least: bool = False
    absolute: bool = False

    def holds(self, value: float) -> bool:
        """Whether a ratio, or a number, is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}" + ("" if self.absolute else " x")


@dataclass(frozen=True)
class Workload:
    """Something to measure.

    Attributes:
        name: to select it by.
        title: for the table.
        unit: of what ``measure`` returns.
        measure: takes the RPC module.
        bar: what must hold; ``None`` for what is measured for information.
    """

    name: str
    title: str
    unit: str
    measure: Callable[[Any], float]
    bar: Bar | None = None


def nothing() -> None:
    """The null call."""


def echo(value: Any) -> Any:
    """There and back."""
    return value


def swallow(value: Any) -> None:
    """There, and only an empty answer back."""


def _seconds_per_call(call: Callable[[], object], calls: int, warm_up: int, batches: int = _BATCHES) -> float:
    """The median over batches of the mean time of a call."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def _null_call(rpc: Any) -> float:
    return 1e6 * _seconds_per_call(lambda: rpc.rpc_sync(CALLEE, nothing), 200, 300)


def _small_tensor(rpc: Any) -> float:
    tensor = torch.randn(16)
    return 1e6 * _seconds_per_call(lambda: rpc.rpc_sync(CALLEE, echo, args=(tensor,)), 150, 200)


def _remote_to_here(rpc: Any) -> float:
    return 1e6 * _seconds_per_call(lambda: rpc.remote(CALLEE, echo, args=(1,)).to_here(), 100, 100)


def _window(rpc: Any, in_flight: int = 1000) -> float:
    def round_trip() -> None:
        futures = [rpc.rpc_async(CALLEE, nothing) for _ in range(in_flight)]
        for future in futures:
            future.wait()

    return in_flight / _seconds_per_call(round_trip, 1, 2)


def _busy_main_thread(rpc: Any, threads: int = 4, seconds: float = 1.5) -> float:
    """Calls per second of several threads while the main thread computes in pure Python."""
    stop = threading.Event()
    counts = [0] * threads

    def call(index: int) -> None:
        while not stop.is_set():
            rpc.rpc_sync(CALLEE, echo, args=(index,))
            counts[index] += 1

    callers = [threading.Thread(target=call, args=(index,)) for index in range(threads)]
    for caller in callers:
        caller.start()
    begin = time.perf_counter()
    value = 1
    while time.perf_counter() - begin < seconds:
        for _ in range(1000):
            value = value * 1103515245 % 2147483648
    elapsed, total = time.perf_counter() - begin, sum(counts)
    stop.set()
    for caller in callers:
        caller.join()
    return total / elapsed


def _idle_cpu(rpc: Any, seconds: float = 2.0) -> float:
    """The share of one core, in percent, that the busier of the two idle workers uses."""
    time.sleep(0.2)  # whatever came before has settled
    there, here, begin = rpc.rpc_sync(CALLEE, time.process_time), time.process_time(), time.perf_counter()
    time.sleep(seconds)
    here, elapsed = time.process_time() - here, time.perf_counter() - begin
    there = rpc.rpc_sync(CALLEE, time.process_time) - there
    return float(100 * max(here, there) / elapsed)


def _transfer(function: Callable[[Any], Any], size: int) -> Callable[[Any], float]:
    def measure(rpc: Any) -> float:
        tensor = torch.ones(size // 4)
        calls = max(1, min(100, 16 * _MIB // size))
        return 1e3 * _seconds_per_call(lambda: rpc.rpc_sync(CALLEE, function, args=(tensor,)), calls, 2, 7)

    return measure


def _transfers() -> Iterator[Workload]:
    for size, text in ((64 * _KIB, "64 KB"), (_MIB, "1 MB"), (16 * _MIB, "16 MB"), (64 * _MIB, "64 MB")):
        name = text.replace(" ", "").lower()
        yield Workload(f"send-{name}", f"{text} tensor sent", "ms", _transfer(swallow, size))
        yield Workload(f"echo-{name}", f"{text} tensor there and back", "ms", _transfer(echo, size))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("null", "null rpc_sync", "µs", _null_call, Bar(0.25)),
        Workload("small", "small tensor there and back", "µs", _small_tensor, Bar(0.25)),
        Workload("remote", "remote(...).to_here()", "µs", _remote_to_here, Bar(0.30)),
        Workload("window", "1,000 rpc_async in flight", "calls/s", _window, Bar(6, at_least=True)),
        Workload("busy", "4 threads, main thread computing", "calls/s", _busy_main_thread),
        Workload("idle", "idle agent", "% CPU", _idle_cpu, Bar(0.5, absolute=True)),
        *_transfers(),
    )
}
"""All workloads by name, in the order in which they run."""
