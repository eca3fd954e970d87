"""A server's metrics for Prometheus, and its access log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["ACCESS", "NOT_SERVED", "Metrics"]

ACCESS: Final = logging.getLogger("farcall.access")
"""One line for each call, at INFO."""

NOT_SERVED: Final = "-"
"""Name of calls without an endpoint."""

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CALLS: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server.

    Args:
        admitted: returns the number of calls that run or wait.
    """

    def __init__(self, admitted: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "farcall_calls", "Calls that have ended.", ["name", "code"], registry=self.registry
        )
        self._seconds = Histogram(
            "farcall_call_seconds",
            "From request to answer.",
            ["name"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batches = Histogram(
            "farcall_batch_calls", "Calls run as one.", ["name"], buckets=_CALLS, registry=self.registry
        )
        self._calls_of = cache(self._calls.labels)
        self._seconds_of = cache(self._seconds.labels)
        gauge = Gauge("farcall_calls_admitted", "Calls that run or wait.", registry=self.registry)
        gauge.set_function(admitted)

    def batch(self, name: str, calls: int) -> None:
        """Record a batch."""
        self._batches.labels(name).observe(calls)

    def ended(self, name: str, caller: str, code: grpc.StatusCode, seconds: float, text: str = "") -> None:
        """Record a call. ``name`` is an endpoint's, or ``NOT_SERVED``, so that strangers cannot create
        labels.
        """
        self._calls_of(name, code.name).inc()
        self._seconds_of(name).observe(seconds)
        ACCESS.info("%s %s %s %.1f ms%s", caller, name, code.name, seconds * 1e3, f": {text}" if text else "")
