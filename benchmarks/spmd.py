"""The command ``python -m benchmarks.spmd``: SPMD mode beside the same training written by hand.

A driver with its workers, and the ranks of a program by hand, take turns: a batch of steps of ours, one of
theirs on the backend ``farcall``, one on gloo. What is printed is the median of the ratios of neighbouring
batches. Also: bytes sent beside the least that must be, and what the driver takes to record a step, and an
operation of it.
"""

from __future__ import annotations

import os

# Before torch is imported: on few cores, its thread pools only get in the way of both sides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import sys
import time
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.spmd_cases import CASES, Case, Sizes, least_bytes
from benchmarks.spmd_sides import BACKENDS, ByHand, OnDevice, Side

__all__ = ["main"]


_LIMITS: Final = {1: 60.0, 2: 95.0, 4: 125.0}
"""Seconds of a case, by workers, after which no other round begins: so four cases take 8 and 10 minutes."""

_LEAST_ROUNDS: Final = 2


def _ratios(
    ours: Side, theirs: Side, case: Case, arguments: argparse.Namespace, until: float
) -> tuple[float, dict[str, float]]:
    """Seconds of our step, and the median of its ratios to theirs, by backend."""
    steps = arguments.steps
    own: list[float] = []
    ratios: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    ours.ask("warm", case.name, steps)
    for done in range(arguments.rounds):
        if done >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        own.append(ours.ask("run", case.name, steps))
        for backend in BACKENDS:
            ratios[backend].append(own[-1] / theirs.ask("run", case.name, backend, steps))
    return statistics.median(own), {name: statistics.median(each) for name, each in ratios.items()}


def _marked(figure: float, bar: float, unit: str = "x") -> str:
    return f"{figure:.2f} {unit} ({'held' if figure <= bar else 'missed'}: {bar:g})"


def _measure(case: Case, workers: int, arguments: argparse.Namespace) -> list[str]:
    """The cells of a row."""
    sizes = arguments.sizes
    until = time.monotonic() + (arguments.seconds or _LIMITS.get(workers, max(_LIMITS.values())))
    ours, theirs = OnDevice(workers, arguments.threads), ByHand(workers, arguments.threads)
    try:
        loss = ours.ask("make", case.name, sizes)
        notes = []
        for backend in BACKENDS:
            other = theirs.ask("make", case.name, backend, sizes)
            if case.same_loss and abs(loss - other) > 1e-4:
                notes.append(f"; the loss is {loss}, by hand on {backend} {other}")
        seconds, ratios = _ratios(ours, theirs, case, arguments, until)
        sent = ours.ask("sent", case.name, arguments.steps)
        step, an_operation = ours.ask("recorded", case.name)
        return [
            case.title + "".join(notes),
            str(workers),
            f"{seconds * 1e3:.0f}",
            case.rival,
            _marked(ratios["farcall"], case.bar),
            _marked(ratios["gloo"], case.gloo_bar),
            f"{sent / 1e6:.1f} MB, {_marked(sent / least_bytes(case.name, workers, sizes), 1.1)}",
            f"{step * 1e3:.1f} ms, {_marked(an_operation * 1e6, 10, 'µs an op')}",
        ]
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
    parser.add_argument("--rounds", type=int, default=7, help="batches of each side, at most; default 7")
    parser.add_argument("--steps", type=int, default=2, help="in a batch; default 2")
    parser.add_argument(
        "--seconds", type=float, help="of a case, after which no other round begins; default 95 for 2 workers"
    )
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
        "driver's CPU a step, recording",
    )
    failed = False
    for workers in arguments.workers:
        for case in CASES:
            if arguments.cases and case.name not in arguments.cases:
                continue
            try:
                row = _measure(case, workers, arguments)
            except SystemExit as error:  # the other cases are still of interest
                failed = True
                console.print(f"[red]{case.title}, {workers} workers: {error}[/red]")
                continue
            console.print(f"[dim]{', '.join(row)}[/dim]")  # what there is, if the rest is cut off
            table.add_row(*row)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
