"""Shows how far an example is: a progress bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["LiveProgress", "live_progress", "live_progresses", "print_figures", "print_line"]

_EVERY: Final = 1.0
"""Seconds between lines of text."""

_NARROW: Final = 80
"""Columns, below which a terminal has no room for all that a bar can say."""


class LiveProgress:
    """One piece of work of known length. Made by ``live_progress``."""

    def __init__(self, title: str, total: int, bars: Progress | None, console: Console) -> None:
        self._title = title
        self._total = total
        self._bars = bars
        self._console = console
        self._task = bars.add_task(title, total=total, note="") if bars else None
        self._done = 0
        self._next = 0.0

    def advance(self, note: str = "", steps: int = 1) -> None:
        """Record finished steps; ``note`` describes the progress, for example ``"loss 0.31"``."""
        self._done += steps
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self._done, note=note)
        elif self._done >= self._total or time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._console.print(f"{self._title}: {self._done} of {self._total}{note and ', '}{note}")

    def finish(self) -> None:
        """No more steps are needed than those that were made."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=self._done)


@contextlib.contextmanager
def live_progress(title: str, total: int, *, plain: bool = False) -> Iterator[LiveProgress]:
    """The display that suits where standard output goes.

    Args:
        title: what is done.
        total: in how many steps.
        plain: lines of text even on a terminal.

    Example::

        with live_progress("training", epochs) as progress:
            for _ in range(epochs):
                progress.advance(f"loss {train():.3f}")
    """
    with live_progresses([title], total, plain=plain) as (progress,):
        yield progress


@contextlib.contextmanager
def live_progresses(
    titles: Sequence[str], total: int, *, plain: bool = False
) -> Iterator[list[LiveProgress]]:
    """Like ``live_progress``, for several pieces of work at once, of the same length."""
    console = Console(highlight=False)
    if plain or not console.is_terminal:
        console.soft_wrap = True
        yield [LiveProgress(title, total, None, console) for title in titles]
        return
    narrow = console.width < _NARROW
    columns = [
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=6 if narrow else 40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, *([] if narrow else [TimeRemainingColumn()]), console=console) as bars:
        yield [LiveProgress(title, total, bars, console) for title in titles]


def print_line(text: str) -> None:
    """Prints a line, which a terminal has in as many as it needs."""
    console = Console(highlight=False)
    console.print(text, soft_wrap=not console.is_terminal)


def print_figures(figures: Mapping[str, str]) -> None:
    """Prints results, one below the other."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, figure in figures.items():
        table.add_row(name, figure)
    console = Console(highlight=False)
    console.print()
    console.print(table)
