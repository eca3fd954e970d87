"""The table as a picture: farcall's time beside the other's, one bar per workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Line

__all__ = ["MissingLibrary", "draw"]

_OURS, _THEIRS, _BAR = "#2a7f62", "#c9c9c9", "#b3261e"


class MissingLibrary(Exception):
    """There is no matplotlib."""


def draw(path: Path, outcome: Sequence[Line], other: str, machine: Mapping[str, Any]) -> None:
    """Draw what was measured.

    Args:
        path: the file; its ending says the format.
        outcome: lines that have a ratio are drawn, in their order.
        other: the name of what farcall is compared with.
        machine: see ``report.machine``.

    Raises:
        MissingLibrary: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibrary("a chart needs matplotlib: pip install matplotlib") from error
    shown = [line for line in outcome if line.cost is not None]
    figure = Figure(figsize=(9, 1.6 + 0.27 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(shown))
    costs = [line.cost or 0.0 for line in shown]
    axes.barh(places, [1.0] * len(shown), height=0.8, color=_THEIRS, label=other)
    axes.barh(places, costs, height=0.5, color=_OURS, label="farcall")
    for place, line in zip(places, shown, strict=True):
        limit = line.limit
        if limit is not None:
            axes.plot([limit, limit], [place - 0.4, place + 0.4], color=_BAR, linewidth=1.5)
        axes.text(costs[place] + 0.01, place, f"{costs[place]:.2f}", va="center", fontsize=8)
    axes.plot([], [], color=_BAR, linewidth=1.5, label="bar")
    axes.set_yticks(list(places), [line.workload.title for line in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.1, 1.1 * max(costs, default=1.0)))
    axes.set_xlabel(f"time, as a share of {other}'s (shorter is better)")
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title(_where(machine), fontsize=8, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _where(machine: Mapping[str, Any]) -> str:
    processor = machine["processor"] or "an unnamed processor"
    versions = f"Python {machine['python']}, PyTorch {machine['torch']}"
    return f"{machine['when'][:10]}, {machine['cores']} cores of {processor}, {versions}"
