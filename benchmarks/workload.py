"""Workloads: something to measure, the same for every RPC module, with a limit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import turns

__all__ = ["CALLEE", "KIB", "MIB", "Bar", "Workload", "instead", "seconds_per_call"]

CALLEE = "worker1"
KIB = 1 << 10
MIB = 1 << 20

_BATCHES: Final = 10
_BATCH_SECONDS: Final = 0.2
"""Long beside the milliseconds for which a process is slower once it has been stopped."""
_WARM_UP_SHARE: Final = 0.3
"""Fraction of a batch that is run unmeasured before it: caches are cold after the other side's batch."""


@dataclass(frozen=True)
class Bar:
    """The limit for farcall's number: at most, or at least, this value."""

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
    """Something to measure. It runs on worker 0; the others serve.

    Attributes:
        name: to select it by.
        title: for the table.
        unit: of what ``measure`` returns.
        measure: takes the RPC module; the modules that are compared have the same names.
        bar: what must hold; ``None`` for what is measured for information.
        workers: how many there are.
        network: they talk over TCP, as between hosts, whatever else they could do.
        stripes: over how many connections large messages go; 0 where that is not what is measured. Only
            farcall can be told.
        encrypted: with TLS, which the network alone does not have. Only farcall can be told.
        own: only farcall has what it measures.
        part: what it is about: ``calls``, ``tensors`` or ``training``. Not every peer has all.
    """

    name: str
    title: str
    unit: str
    measure: Callable[[Any], float]
    bar: Bar | None = None
    workers: int = 2
    network: bool = False
    stripes: int = 0
    encrypted: bool = False
    own: bool = False
    part: str = "calls"

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit.endswith("/s")


instead: list[Callable[[Callable[[], object]], float]] = []
"""In a worker that is to do something else with a call than to measure it: what it does."""


def seconds_per_call(call: Callable[[], object], batches: int = _BATCHES) -> float:
    """The median over batches of the mean time of a call. The other side's batches come between."""
    if instead:
        return instead[0](call)
    call()
    made, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < _BATCH_SECONDS:
        call()
        made += 1
    calls = math.ceil(made * _BATCH_SECONDS / elapsed)
    times = []
    for _ in range(batches):
        turns.pass_on()
        for _ in range(math.ceil(calls * _WARM_UP_SHARE)):
            call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)
