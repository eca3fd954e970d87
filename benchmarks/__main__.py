"""The command: ``python -m benchmarks``, see ``--help``."""

from __future__ import annotations

import os

# Before torch is imported: on few cores, its thread pools only get in the way of both sides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console

from benchmarks import chart, group, report, turns
from benchmarks.workloads import WORKLOADS

__all__ = ["main"]

_HOW_TO_GET = {
    "torch": "this PyTorch has no torch.distributed.rpc",
    "grpc": "there is no gRPC here (pip install grpcio)",
    "ray": "there is no Ray here (pip install ray)",
}
_RESULTS = Path(__file__).parent / "results"


_FILE_WIDTH = 110
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
        choices=list(report.NAMES),
        default="torch",
        help="what to compare with (default torch; grpc needs grpcio, ray needs ray)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="S", help="seconds that each part of a run may take"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results"
    )
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw it too: docs/benchmarks.svg (needs matplotlib)"
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
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    selected = arguments.workloads or list(WORKLOADS)
    sides = ["farcall"]
    if arguments.peer != "none":
        if group.is_available(arguments.peer):
            sides.append(arguments.peer)
        else:
            console.print(f"{_HOW_TO_GET[arguments.peer]}: measuring farcall alone")
    numbers: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(arguments.repeats):
        console.print(f"[dim]run {repeat + 1} of {arguments.repeats}: {' and '.join(sides)}[/dim]")
        try:
            measured = group.measure(sides, selected, arguments.timeout)
        except turns.Failed as failure:
            console.print(f"[red]{failure}[/red]", highlight=False)
            return 2
        for side in sides:
            numbers[side].append(measured[side])
    outcome = report.lines(numbers, selected)
    console.print(report.table(outcome, arguments.repeats, arguments.peer))
    path = arguments.output or _RESULTS / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}.json"
    report.save(path, numbers, outcome)
    console.print(f"written to {path}")
    if arguments.chart is not None:
        try:
            chart.draw(arguments.chart, outcome, report.NAMES[arguments.peer], report.machine())
        except chart.MissingLibrary as missing:
            console.print(f"[red]{missing}[/red]", highlight=False)
            return 2
        console.print(f"drawn to {arguments.chart}")
    missed = [line.workload.title for line in outcome if line.holds is False]
    if missed:
        console.print(f"[red]missed: {', '.join(missed)}[/red]")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
