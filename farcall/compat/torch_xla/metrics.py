"""``torch_xla.debug.metrics``: their compiler's counters, of which there are none here, as theirs has none
before anything is compiled. What workers had to move stands in the report.
"""

from __future__ import annotations

from spmd.engine import start

__all__ = [
    "clear_all",
    "clear_counters",
    "clear_metrics",
    "counter_names",
    "counter_value",
    "executed_fallback_ops",
    "metric_data",
    "metric_names",
    "metrics_report",
    "short_metrics_report",
]


def counter_names() -> list[str]:
    """None."""
    return []


metric_names = executed_fallback_ops = counter_names


def counter_value(name: str) -> None:
    """None, as for a counter that has counted nothing."""


def metric_data(name: str) -> None:
    """None, as for a metric without samples."""


def clear_all() -> None:
    """Nothing."""


clear_counters = clear_metrics = clear_all


def metrics_report() -> str:
    """Which operations needed their inputs elsewhere: ``str(spmd.report())``."""
    return str(start.report()) if start.is_spmd() else ""


def short_metrics_report(
    counter_names: list[str] | None = None, metric_names: list[str] | None = None
) -> str:
    """The same."""
    return metrics_report()
