"""The command ``python -m benchmarks.spmd``: SPMD mode beside the same training written by hand.

A driver with its workers, and the ranks of a program by hand, take turns: a batch of steps of ours, one of
theirs on the backend ``farcall``, one on gloo. What is printed is the median of the ratios of neighbouring
batches. Also: bytes sent beside the least that must be, what memory grows by in a step, and what the driver
takes to record a step, and an operation of it.
"""

from __future__ import annotations

import os

# Before torch is imported: on few cores, its thread pools only get in the way of both sides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.spmd_cases import CASES, Case, Sizes, least_bytes
from benchmarks.spmd_sides import BACKENDS, ByHand, OnDevice, Side

__all__ = ["main"]


def _ratios(ours: Side, theirs: Side, case: Case, rounds: int, steps: int) -> tuple[float, dict[str, float]]:
    """Seconds of our step, and the median of its ratios to theirs, by backend."""
    own: list[float] = []
    ratios: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    ours.ask("run", case.name, steps)  # programs of so many steps are made and linked
    for _ in range(rounds):
        own.append(ours.ask("run", case.name, steps))
        for backend in BACKENDS:
            ratios[backend].append(own[-1] / theirs.ask("run", case.name, backend, steps))
    return statistics.median(own), {name: statistics.median(each) for name, each in ratios.items()}


def _marked(ratio: float, bar: float) -> str:
    return f"{ratio:.2f} x ({'' if ratio <= bar else 'misses '}{bar:g})"


def _measure(case: Case, workers: int, arguments: argparse.Namespace, table: Table, console: Console) -> None:
    sizes = arguments.sizes
    ours, theirs = OnDevice(workers, arguments.threads), ByHand(workers, arguments.threads)
    try:
        loss = ours.ask("make", case.name, sizes)
        for backend in BACKENDS:
            other = theirs.ask("make", case.name, backend, sizes)
            if case.same_loss and abs(loss - other) > 1e-4:
                console.print(f"[red]{case.title}: the loss is {loss}, by hand on {backend} {other}[/red]")
        seconds, ratios = _ratios(ours, theirs, case, arguments.rounds, arguments.steps)
        recorded, an_operation = ours.ask("recorded", case.name, arguments.steps)
        grows = ours.ask("grows", case.name, arguments.steps) / (1 << 20)
        rival_grows = theirs.ask("grows", case.name, "farcall", arguments.steps) / (1 << 20)
        sent = ours.ask("sent", case.name, arguments.steps)
        least = least_bytes(case.name, workers, sizes)
        table.add_row(
            case.title,
            str(workers),
            f"{seconds * 1e3:.1f}",
            case.rival,
            _marked(ratios["farcall"], case.bar),
            _marked(ratios["gloo"], case.gloo_bar),
            f"{sent / 1e6:.1f} MB, {_marked(sent / least, 1.1)}",
            f"{grows:.0f}, {case.rival} {rival_grows:.0f}",
            f"{recorded * 1e3:.1f} ms, {an_operation * 1e6:.1f} µs an op",
        )
    finally:
        ours.end()
        theirs.end()


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spmd", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], metavar="N", help="default 2 and 4")
    parser.add_argument("--threads", type=int, default=1, help="of each rank by hand; default 1")
    parser.add_argument("--rounds", type=int, default=7, help="batches of each side; default 7")
    parser.add_argument("--steps", type=int, default=5, help="in a batch; default 5")
    for name in ("layers", "width", "batch", "length", "vocabulary", "images", "pixels"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes(), name))
    arguments = parser.parse_args(argv)
    wrong = [each for each in arguments.cases if each not in names]
    if wrong:
        parser.error(f"expected cases of {', '.join(names)}, got {', '.join(wrong)}")
    fields = ("layers", "width", "batch", "length", "vocabulary", "images", "pixels")
    arguments.sizes = Sizes(**{name: getattr(arguments, name) for name in fields})
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    table = Table(
        "",
        "workers",
        "ours, ms",
        "by hand",
        "on farcall",
        "on gloo",
        "sent",
        "grows, MB",
        "records (10 µs an op)",
    )
    for workers in arguments.workers:
        for case in CASES:
            if not arguments.cases or case.name in arguments.cases:
                console.print(f"[dim]{case.title}, {workers} workers[/dim]")
                _measure(case, workers, arguments, table, console)
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
