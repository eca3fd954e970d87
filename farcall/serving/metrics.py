"""What a server tells of itself: Prometheus metrics, and one line of log for each call.

Calls are counted in plain numbers, and become Prometheus's metrics when somebody asks for these.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

__all__ = ["ACCESS", "Metrics"]

ACCESS: Final = logging.getLogger("farcall.access")
"""One line for each call, at INFO."""

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_CALLS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class _Histogram:
    """How many values there were up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def put(self, family: HistogramMetricFamily, name: str) -> None:
        names = [*map(str, self._bounds), "+Inf"]
        family.add_metric([name], list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class Metrics(Collector):
    """The metrics of one server. Calls are noted on its loop; any thread may collect.

    Args:
        admitted: how many calls run or wait.
    """

    def __init__(self, admitted: Callable[[], int]) -> None:
        self._admitted = admitted
        self._calls: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, _Histogram] = defaultdict(lambda: _Histogram(_SECONDS))
        self._batches: defaultdict[str, _Histogram] = defaultdict(lambda: _Histogram(_CALLS))
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus gets."""
        calls = CounterMetricFamily("farcall_calls", "Calls that have ended.", labels=["name", "code"])
        for labels, count in list(self._calls.items()):
            calls.add_metric(labels, count)
        yield calls
        for name, text, histograms in (
            ("farcall_call_seconds", "From request to answer.", self._seconds),
            ("farcall_batch_calls", "Calls run as one.", self._batches),
        ):
            family = HistogramMetricFamily(name, text, labels=["name"])
            for label, histogram in list(histograms.items()):
                histogram.put(family, label)
            yield family
        yield GaugeMetricFamily("farcall_calls_admitted", "Calls that run or wait.", self._admitted())

    def publish(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serve them over HTTP.

        Returns:
            The port, and what ends it.

        Raises:
            OSError: the port is taken.
        """
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise OSError(
                error.errno, f"metrics cannot be served at {host}:{port}: {error.strerror or error}"
            ) from error

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, end

    def batch(self, name: str, calls: int) -> None:
        """Note a batch."""
        self._batches[name].add(calls)

    def ended(self, name: str, caller: str, code: grpc.StatusCode, seconds: float, text: str = "") -> None:
        """Note a call. ``name`` is one that is served, or "-": strangers must not make up labels."""
        self._calls[name, code.name] += 1
        self._seconds[name].add(seconds)
        ACCESS.info("%s %s %s %.1f ms%s", caller, name, code.name, seconds * 1e3, f": {text}" if text else "")
