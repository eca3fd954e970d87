"""The command: ``python -m benchmarks``, see ``--help``."""

from __future__ import annotations

import os

# Before torch is imported: on few cores, its thread pools only get in the way of both sides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import chart, report
from benchmarks.measuring import measure
from benchmarks.sides import FARCALL, PEERS, Side, Unavailable, peer, revision
from benchmarks.turns import Failure
from benchmarks.workloads import WORKLOADS

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_FILE_WIDTH: Final = 110
"""Columns of the table where no terminal says how many there are."""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures farcall and torch.distributed.rpc on fresh processes, batch by batch in turn.",
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"default: all. There are: {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each side (default 3)")
    parser.add_argument(
        "--peer",
        default="torch",
        help=f"what to compare with: {', '.join(PEERS)}, none, or a revision of farcall (default torch)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="seconds that a workload may take one side"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results"
    )
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw it too: docs/benchmarks.svg (needs matplotlib)"
    )
    parser.add_argument(
        "--budget", action="store_true", help="print where a step's time goes, and compare with nothing"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are: {', '.join(WORKLOADS)}")
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save; returns the exit status."""
    arguments = _arguments(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if arguments.budget:
        return _budget(console, arguments.workloads or ["null"], arguments.timeout)
    with tempfile.TemporaryDirectory(prefix="farcall-revision-") as folder:
        try:
            sides = _sides(arguments.peer, Path(folder))
        except Unavailable as reason:
            console.print(f"[red]{reason}[/red]")
            return 2
        selected = arguments.workloads or list(WORKLOADS)
        numbers = _measure(console, sides, selected, arguments.repeats, arguments.timeout)
    outcome = report.lines(numbers, selected)
    other = sides[-1].title if len(sides) > 1 else "nothing"
    console.print(report.table(outcome, arguments.repeats, other))
    path = arguments.output or _RESULTS / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}.json"
    report.save(path, numbers, outcome)
    console.print(f"written to {path}")
    if arguments.chart is not None:
        try:
            chart.draw(arguments.chart, outcome, other, report.machine())
        except chart.MissingLibrary as missing:
            console.print(f"[red]{missing}[/red]")
            return 2
        console.print(f"drawn to {arguments.chart}")
    missed = [line.workload.title for line in outcome if line.holds is False]
    if missed:
        console.print(f"[red]missed: {', '.join(missed)}[/red]")
    return 1 if missed and arguments.check else 0


def _budget(console: Console, selected: Sequence[str], limit: float) -> int:
    failed = False
    for name, outcomes in measure([FARCALL], selected, limit, budget=True):
        for outcome in outcomes.values():
            if isinstance(outcome, Failure):
                failed = True
                console.print(f"[red]{name}: {outcome.reason}[/red]")
                console.print(outcome.details, style="dim", markup=False)
    return 1 if failed else 0


def _sides(other: str, folder: Path) -> list[Side]:
    if other == "none":
        return [FARCALL]
    return [FARCALL, peer(other) if other in PEERS else revision(other, folder)]


def _measure(
    console: Console, sides: Sequence[Side], selected: Sequence[str], repeats: int, limit: float
) -> report.Numbers:
    """Return the report, even if a KeyboardInterrupt ends the run early."""
    numbers: dict[str, dict[str, list[float | Failure]]] = {side.name: {} for side in sides}
    try:
        for repeat in range(repeats):
            console.print(f"[dim]run {repeat + 1} of {repeats}: {' and '.join(numbers)}[/dim]")
            for name, outcomes in measure(sides, selected, limit):
                for side, outcome in outcomes.items():
                    numbers[side].setdefault(name, []).append(outcome)
                    if isinstance(outcome, Failure):
                        console.print(f"[red]{side}: {name}: {outcome.reason}[/red]")
                        console.print(outcome.details, style="dim", markup=False)
    except KeyboardInterrupt:
        console.print("[red]interrupted: this is what there is[/red]")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
