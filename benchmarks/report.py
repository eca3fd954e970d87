"""From many numbers to a table, a file and a verdict."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.sides import PEERS
from benchmarks.turns import Failure
from benchmarks.workload import Bar, Workload
from benchmarks.workloads import WORKLOADS

__all__ = ["Line", "lines", "machine", "save", "table"]

_NO_SLOWER = 1.05
"""The bar for the cost of farcall beside an earlier revision of it: noise, and no more."""

Numbers = Mapping[str, Mapping[str, Sequence[float | Failure]]]
"""By side and workload, what each repetition has measured. farcall comes first."""


@dataclass(frozen=True)
class Column:
    """One side's results for one workload, a number or a failure for each repetition."""

    outcomes: Sequence[float | Failure] = ()

    @property
    def numbers(self) -> list[float]:
        """Of the repetitions that did not fail."""
        return [each for each in self.outcomes if not isinstance(each, Failure)]

    @property
    def failures(self) -> list[Failure]:
        """Of those that did."""
        return [each for each in self.outcomes if isinstance(each, Failure)]

    @property
    def median(self) -> float | None:
        """Of the numbers, if there are any."""
        return statistics.median(self.numbers) if self.numbers else None

    @property
    def spread(self) -> float:
        """The range of the numbers as a share of their median."""
        return (max(self.numbers) - min(self.numbers)) / self.median if self.median else 0.0

    def __str__(self) -> str:
        """The cell of the table: a number, or why there is none."""
        if self.median is None:
            return f"[red]{self.failures[0].reason}" if self.failures else "-"
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        failed = f" [red]{len(self.failures)} failed" if self.failures else ""
        spread = f" [dim]±{50 * self.spread:.0f} %[/dim]" if len(self.numbers) > 1 else ""
        return f"{self.median:,.{digits}f}{spread}{failed}"


@dataclass(frozen=True)
class Line:
    """One workload's outcome.

    Attributes:
        ours: what farcall has measured.
        theirs: what the other has.
        other: the other's name; ``None`` if farcall was measured alone.
    """

    workload: Workload
    ours: Column
    theirs: Column
    other: str | None

    @property
    def bar(self) -> Bar | None:
        """What holds: bars are about PyTorch, farcall without TLS, or the number itself; no revision may be
        slower.
        """
        bar = self.workload.bar
        meant = "plain" if self.workload.encrypted else "torch"
        if (bar is not None and bar.absolute) or self.other == meant:
            return bar
        if self.other is None or self.other in PEERS:
            return None
        return Bar(round(1 / _NO_SLOWER, 2), at_least=True) if self.workload.is_rate else Bar(_NO_SLOWER)

    @property
    def ratio(self) -> float | None:
        """Our number to theirs, the median over the repetitions: what was measured together is compared."""
        pairs = zip(self.ours.outcomes, self.theirs.outcomes, strict=False)
        ratios = [
            ours / theirs
            for ours, theirs in pairs
            if not isinstance(ours, Failure) and not isinstance(theirs, Failure)
        ]
        return statistics.median(ratios) if ratios else None

    @property
    def cost(self) -> float | None:
        """Our time as a share of the other's, also where rates are measured."""
        if self.ratio is None or (self.bar is not None and self.bar.absolute):
            return None
        return 1 / self.ratio if self.workload.is_rate else self.ratio

    @property
    def limit(self) -> float | None:
        """The maximum of ``cost``."""
        if self.bar is None or self.bar.absolute:
            return None
        return 1 / self.bar.limit if self.bar.at_least else self.bar.limit

    @property
    def holds(self) -> bool | None:
        """Whether the bar holds; ``None`` where there is none, or nothing to compare with."""
        if self.ours.failures:
            return False
        value = self.ours.median if self.bar is not None and self.bar.absolute else self.ratio
        return None if self.bar is None or value is None else self.bar.holds(value)


def lines(numbers: Numbers, workloads: Sequence[str]) -> list[Line]:
    """Sum up what was measured, a line per workload."""
    side, *others = numbers
    other = others[0] if others else None
    theirs = numbers[other] if other is not None else {}
    return [
        Line(WORKLOADS[name], Column(numbers[side].get(name, ())), Column(theirs.get(name, ())), other)
        for name in workloads
    ]


def table(outcome: Sequence[Line], repeats: int, other: str) -> Table:
    """The lines as a table for people; ``other`` is the full name of what farcall is compared with."""
    result = Table(
        title=f"farcall beside {other}",
        caption=f"median of {repeats} runs in turn, ± half their range" if repeats > 1 else "one run",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    result.add_column("workload", no_wrap=True)
    name = next((line.other for line in outcome if line.other), "-")
    for heading in ("unit", "farcall", name, "ratio", "bar"):
        result.add_column(heading, justify="left" if heading == "unit" else "right", no_wrap=True)
    for line in outcome:
        mark = {None: "", True: "[green]✓", False: "[red]✗"}[line.holds]
        ratio = "-" if line.cost is None else f"{line.ratio:.2f} x"
        result.add_row(
            line.workload.title,
            line.workload.unit,
            str(line.ours),
            str(line.theirs),
            ratio,
            f"{line.bar or ''} {mark}",
        )
    return result


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
            "farcall": line.ours.median,
            "other": line.theirs.median,
            "spread": [line.ours.spread, line.theirs.spread],
            "ratio": line.ratio,
            "bar": str(line.bar) if line.bar else None,
            "holds": line.holds,
        }
        for line in outcome
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "summary": summary, "runs": numbers}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=asdict) + "\n")
