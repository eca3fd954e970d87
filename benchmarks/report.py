"""From many numbers to a table, a file and a verdict."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

__all__ = ["NAMES", "Line", "lines", "machine", "save", "table"]

NAMES = {"torch": "torch.distributed.rpc", "grpc": "gRPC", "ray": "Ray", "none": "nothing"}
"""What farcall can be compared with."""

Numbers = Mapping[str, Sequence[Mapping[str, float]]]
"""By side: for each repetition, by workload, what was measured."""


@dataclass(frozen=True)
class Line:
    """One workload's outcome.

    Attributes:
        ours: farcall's median.
        theirs: the other's; ``None`` if it was not measured.
        spread: of each side, the range of its numbers as a share of their median.
        ratio: ours to theirs.
        holds: whether the bar holds; ``None`` without a bar, or without what it refers to:
            ``torch.distributed.rpc``, unless it is about the number itself.
    """

    workload: Workload
    ours: float
    theirs: float | None
    spread: tuple[float, ...]
    ratio: float | None
    holds: bool | None

    @property
    def cost(self) -> float | None:
        """Our time as a share of the other's, also where rates are measured."""
        if self.ratio is None or (self.workload.bar is not None and self.workload.bar.absolute):
            return None
        return 1 / self.ratio if self.workload.is_rate else self.ratio

    @property
    def limit(self) -> float | None:
        """What ``cost`` may be at most."""
        bar = self.workload.bar
        if bar is None or bar.absolute:
            return None
        return 1 / bar.limit if bar.at_least else bar.limit


def lines(numbers: Numbers, workloads: Sequence[str]) -> list[Line]:
    """Sum up what was measured, a line per workload."""
    bars_hold = "torch" in numbers
    return [_line(WORKLOADS[name], *_columns(numbers, name), bars_hold=bars_hold) for name in workloads]


def _columns(numbers: Numbers, name: str) -> tuple[list[float], list[float]]:
    ours = [run[name] for run in numbers["farcall"]]
    others = [run for side, runs in numbers.items() if side != "farcall" for run in runs]
    theirs = [run[name] for run in others if name in run]
    return ours, theirs


def _line(workload: Workload, ours: list[float], theirs: list[float], *, bars_hold: bool) -> Line:
    our_median = statistics.median(ours)
    their_median = statistics.median(theirs) if theirs else None
    ratio = our_median / their_median if their_median else None
    bar = workload.bar
    value = our_median if bar is not None and bar.absolute else ratio if bars_hold else None
    holds = None if bar is None or value is None else bar.holds(value)
    spread = tuple(_spread(column) for column in (ours, theirs) if column)
    return Line(workload, our_median, their_median, spread, ratio, holds)


def _spread(column: Sequence[float]) -> float:
    middle = statistics.median(column)
    return (max(column) - min(column)) / middle if middle else 0.0


def table(outcome: Sequence[Line], repeats: int, other: str = "torch") -> Table:
    """The lines as a table for people; ``other`` is what farcall is compared with."""
    result = Table(
        title=f"farcall beside {NAMES[other]}",
        caption=f"median of {repeats} runs in turn, ± half their range" if repeats > 1 else "one run",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    result.add_column("workload", no_wrap=True)
    for heading in ("unit", "farcall", other, "ratio", "bar"):
        result.add_column(heading, justify="left" if heading == "unit" else "right", no_wrap=True)
    for line in outcome:
        bar = line.workload.bar
        mark = {None: "", True: "[green]✓", False: "[red]✗"}[line.holds]
        theirs = "-" if line.theirs is None else _number(line.theirs, line.spread[1], repeats)
        compared = line.ratio is not None and not (bar and bar.absolute)
        result.add_row(
            line.workload.title,
            line.workload.unit,
            _number(line.ours, line.spread[0], repeats),
            theirs,
            f"{line.ratio:.2f} x" if compared else "-",
            f"{bar or ''} {mark}",
        )
    return result


def _number(value: float, spread: float, repeats: int) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}" + (f" [dim]±{50 * spread:.0f} %[/dim]" if repeats > 1 else "")


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in described if line.startswith("model name")), "")


def save(path: Path, numbers: Numbers, outcome: Sequence[Line]) -> None:
    """Write everything to a JSON file."""
    summary = {
        line.workload.name: {
            "title": line.workload.title,
            "unit": line.workload.unit,
            "farcall": line.ours,
            "other": line.theirs,
            "spread": list(line.spread),
            "ratio": line.ratio,
            "bar": str(line.workload.bar) if line.workload.bar else None,
            "holds": line.holds,
        }
        for line in outcome
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = {side: list(each) for side, each in numbers.items()}
    content = {"machine": machine(), "summary": summary, "runs": runs}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
