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
_SIZES = (16 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
_STREAMS = 2
_SPACING_SECONDS = 0.002
_SPACED_CALLS = 250
_MOST_SECONDS = 8.0
"""Calls that wait behind large tensors take seconds: then these are few."""


def swallow(value: Any) -> None:
    """There, and only an empty answer back."""


def _transfer(function: Callable[[Any], Any], size: int) -> Callable[[Any], float]:
    def measure(rpc: Any) -> float:
        tensor = torch.ones(size // 4)
        return 1e3 * seconds_per_call(lambda: rpc.rpc_sync(CALLEE, function, args=(tensor,)))

    return measure


def _spaced(rpc: Any, calls: int = _SPACED_CALLS) -> float:
    times: list[float] = []
    end = time.perf_counter() + _MOST_SECONDS
    while len(times) < calls and time.perf_counter() < end:
        time.sleep(_SPACING_SECONDS)
        begin = time.perf_counter()
        rpc.rpc_sync(CALLEE, nothing)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _under_streams(rpc: Any) -> float:
    """The time of small calls while 256 MB tensors stream both ways, by that of the same calls otherwise."""
    tensor = torch.ones(256 * MIB // 4)
    stop = threading.Event()

    def stream() -> None:
        while not stop.is_set():
            rpc.rpc_sync(CALLEE, echo, args=(tensor,))

    rpc.rpc_sync(CALLEE, echo, args=(tensor,))
    idle = _spaced(rpc)
    streams = [threading.Thread(target=stream) for _ in range(_STREAMS)]
    for each in streams:
        each.start()
    try:
        _spaced(rpc, 10)
        return _spaced(rpc) / idle
    finally:
        stop.set()
        for each in streams:
            each.join()


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
    for size in (MIB, 64 * MIB):
        text = _text(size)
        yield Workload(
            f"tcp-{text.replace(' ', '').lower()}",
            f"{text} tensor sent, TCP",
            "ms",
            _transfer(swallow, size),
            network=True,
            part="tensors",
        )
        yield Workload(
            f"tls-{text.replace(' ', '').lower()}",
            f"{text} tensor sent, TCP with TLS",
            "ms",
            _transfer(swallow, size),
            network=True,
            encrypted=True,
            part="tensors",
        )
    yield Workload(
        "streaming",
        "small calls beside 256 MB, TCP",
        "x idle",
        _under_streams,
        Bar(5, absolute=True),
        network=True,
        part="tensors",
    )
