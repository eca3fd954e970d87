"""``torch_xla.debug.metrics``: messages to and from workers, under XLA's names.

A *program* is what XLA calls a graph: a new one is counted as compiled. There are no times and no counters of
operators. Data that workers had to move is listed in the report.
"""

from __future__ import annotations

from typing import Final

from spmd.engine.driver import start
from spmd.engine.driver.current import engine, is_running
from spmd.sharding.mesh import made_op_shardings

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

_COUNTERS: Final = {
    "CompileWithAutoSharding": "new_auto",
    "CreateOpSharding": "op_shardings",
    "ExecuteReplicated": "programs",
    "UncachedCompile": "new",
}
_METRICS: Final = {
    "CompileTime": ("new", None),
    "ExecuteReplicatedTime": ("programs", None),
    "OutboundData": ("uploads", "uploaded_bytes"),
    "TransferFromDeviceTime": ("fetches", None),
    "TransferToDeviceTime": ("uploads", None),
}
"""By name: which count is the number of samples, and which their sum."""

_at_clear: Final[dict[str, int]] = {}


def _counts() -> dict[str, int]:
    counts: dict[str, int] = engine().counts if is_running() else {}
    return {**counts, "op_shardings": made_op_shardings()}


def _count(name: str) -> int:
    """How much more since counts were cleared, or since SPMD mode began."""
    now = _counts().get(name, 0)
    return now - min(_at_clear.get(name, 0), now)


def counter_names() -> list[str]:
    """Those that have counted."""
    return [name for name, count in _COUNTERS.items() if _count(count)]


def counter_value(name: str) -> int | None:
    """Return the value of a counter; None if it has none."""
    return _count(_COUNTERS[name]) or None if name in _COUNTERS else None


def metric_names() -> list[str]:
    """Those that have samples."""
    return [name for name, (samples, _) in _METRICS.items() if _count(samples)]


def metric_data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """Return the number of samples, their sum (of bytes; 0 for times, which are not measured), and no
    samples; None if there are none.
    """
    samples, total = _METRICS.get(name, ("", None))
    if not _count(samples):
        return None
    return _count(samples), float(_count(total)) if total else 0.0, ()


def executed_fallback_ops() -> list[str]:
    """None."""
    return []


def clear_all() -> None:
    """Count from 0."""
    _at_clear.update(_counts())


clear_counters = clear_metrics = clear_all


def metrics_report() -> str:
    """The counts, and which operations needed their inputs elsewhere: ``str(spmd.report())``."""
    lines = [f"Counter: {name}\n  Value: {counter_value(name)}" for name in counter_names()]
    lines += [f"Metric: {name}\n  TotalSamples: {_count(_METRICS[name][0])}" for name in metric_names()]
    return "\n".join([*lines, *([str(start.report())] if start.is_spmd() else [])])


def short_metrics_report(
    counter_names: list[str] | None = None, metric_names: list[str] | None = None
) -> str:
    """The same."""
    return metrics_report()
