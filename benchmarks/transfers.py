"""Large tensors: how long they take, and what small calls notice of them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.calls import echo, nothing
from benchmarks.workload import CALLEE, KIB, MIB, Bar, Workload, seconds_per_call

__all__ = ["workloads"]

_BARS = {64 * KIB: 0.35, MIB: 0.45, 16 * MIB: 0.70, 64 * MIB: 0.40, 256 * MIB: 0.38}
_TCP_BARS = {MIB: 0.6, 16 * MIB: 0.5, 64 * MIB: 0.45, 256 * MIB: 0.45}
_TLS_BAR = 1.6
"""Compared with the same without TLS: ``--peer plain``."""
_SIZES = (16 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
_SPACING_SECONDS = 0.002
_PERCENTILE_CALLS = 1000
_MOST_SECONDS = 8.0
"""Calls that wait behind large tensors take seconds: then these are few."""


def swallow(value: Any) -> None:
    """There, and only an empty answer back."""


def _transfer(function: Callable[[Any], Any], size: int) -> Callable[[Any], float]:
    def measure(rpc: Any) -> float:
        tensor = torch.ones(size // 4)
        return 1e3 * seconds_per_call(lambda: rpc.rpc_sync(CALLEE, function, args=(tensor,)))

    return measure


def _times(rpc: Any, calls: int) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + _MOST_SECONDS
    while len(times) < calls and time.perf_counter() < end:
        time.sleep(_SPACING_SECONDS)
        begin = time.perf_counter()
        rpc.rpc_sync(CALLEE, nothing)
        times.append(time.perf_counter() - begin)
    return times


def _behind_a_transfer(rpc: Any) -> float:
    """The 99th percentile of the time of null calls while tensors of 64 MB are on their way, by that of the
    same calls otherwise.
    """
    tensor = torch.ones(64 * MIB // 4)
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            rpc.rpc_sync(CALLEE, swallow, args=(tensor,))

    for _ in range(3):
        rpc.rpc_sync(CALLEE, swallow, args=(tensor,))
    idle = _late(_times(rpc, _PERCENTILE_CALLS))
    sender = threading.Thread(target=send)
    sender.start()
    try:
        return _late(_times(rpc, _PERCENTILE_CALLS)) / idle
    finally:
        stop.set()
        sender.join()


def _late(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[-1]


def _text(size: int) -> str:
    return f"{size // MIB} MB" if size >= MIB else f"{size // KIB} KB"


def workloads() -> Iterator[Workload]:
    """All that are about large tensors."""
    for size in _SIZES:
        text, bar = _text(size), Bar(_BARS[size]) if size in _BARS else None
        name = text.replace(" ", "").lower()
        yield Workload(
            f"send-{name}", f"{text} tensor sent", "ms", _transfer(swallow, size), bar, part="tensors"
        )
        yield Workload(
            f"echo-{name}", f"{text} tensor there and back", "ms", _transfer(echo, size), bar, part="tensors"
        )
    for size, limit in _TCP_BARS.items():
        text = _text(size)
        yield Workload(
            f"tcp-{text.replace(' ', '').lower()}",
            f"{text} tensor sent, TCP",
            "ms",
            _transfer(swallow, size),
            Bar(limit),
            network=True,
            part="tensors",
        )
        yield Workload(
            f"tls-{text.replace(' ', '').lower()}",
            f"{text} tensor sent, TCP with TLS",
            "ms",
            _transfer(swallow, size),
            Bar(_TLS_BAR) if size == 64 * MIB else None,
            network=True,
            encrypted=True,
            part="tensors",
        )
    yield Workload(
        "tcp-late",
        "slowest of 100 null calls beside 64 MB, TCP",
        "x idle",
        _behind_a_transfer,
        Bar(3, absolute=True),
        network=True,
        part="tensors",
    )
