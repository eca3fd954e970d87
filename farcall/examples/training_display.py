"""Shows how training goes: a progress bar per trainer on a terminal, lines of text elsewhere."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from farcall.examples.progress import figures_table, progress_bars

__all__ = ["TrainerProgress", "TrainingDisplay", "training_display"]

Place = tuple[str, int]
"""A host and a process id."""


class TrainerProgress(NamedTuple):
    """How far one trainer is: updates so far, and the loss of its latest batch."""

    steps: int
    loss: float


class TrainingDisplay(ABC):
    """Where progress and results go."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @abstractmethod
    def show(self, trainers: Sequence[TrainerProgress]) -> None:
        """Shows where the trainers are now, in the order in which they were named."""

    def summary(self, names: Sequence[str], places: Sequence[Place], figures: Mapping[str, str]) -> None:
        """Shows where each worker ran, and what came out."""
        workers = Table("worker", "host", "process", box=None, pad_edge=False)
        for name, (host, pid) in zip(names, places, strict=True):
            workers.add_row(name, host, str(pid))
        for table in (workers, figures_table(figures)):
            self._console.print()
            self._console.print(table)


@contextlib.contextmanager
def training_display(
    names: Sequence[str], places: Sequence[Place], steps: int, *, plain: bool = False
) -> Iterator[TrainingDisplay]:
    """The display that suits where standard output goes; bars are finished at the end.

    Args:
        names: of the trainers.
        places: where each runs, in the same order.
        steps: how many updates each is to make.
        plain: lines of text even on a terminal.
    """
    console = Console(highlight=False)
    titles = [f"{name} on {host}, process {pid}" for name, (host, pid) in zip(names, places, strict=True)]
    if plain or not console.is_terminal:
        console.soft_wrap = True
        for title in titles:
            console.print(title)
        yield _Lines(console, names, steps)
        return
    with progress_bars(console) as bars:
        # A narrow terminal has no room for where each runs; the summary says it.
        yield _Bars(console, bars, titles if max(map(len, titles)) < console.width // 2 else names, steps)


class _Bars(TrainingDisplay):
    def __init__(self, console: Console, bars: Progress, titles: Sequence[str], steps: int) -> None:
        super().__init__(console)
        self._bars = bars
        self._tasks = [bars.add_task(title, total=steps, note="") for title in titles]

    def show(self, trainers: Sequence[TrainerProgress]) -> None:
        for task, trainer in zip(self._tasks, trainers, strict=True):
            self._bars.update(task, completed=trainer.steps, note=f"loss {trainer.loss:.3f}")


class _Lines(TrainingDisplay):
    _EVERY = 1.0  # seconds

    def __init__(self, console: Console, names: Sequence[str], steps: int) -> None:
        super().__init__(console)
        self._names = names
        self._steps = steps
        self._next = 0.0

    def show(self, trainers: Sequence[TrainerProgress]) -> None:
        finished = all(trainer.steps == self._steps for trainer in trainers)
        started = all(trainer.steps for trainer in trainers)
        if not finished and (not started or time.monotonic() < self._next):
            return
        self._next = time.monotonic() + self._EVERY
        for name, trainer in zip(self._names, trainers, strict=True):
            self._console.print(f"{name}: {trainer.steps} of {self._steps} updates, loss {trainer.loss:.3f}")
