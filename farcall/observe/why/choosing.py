"""Chooses the job that a command shows: the named one, or else one for all commands, however often they look.

Of several live jobs that is the one that hangs most clearly, and else the one that began last. The time of
the last write decides only between jobs that are over: the workers of all live jobs write all the time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farcall.observe.format.jobs import JobFolder, find_job, jobs
from farcall.observe.reading.reader import read_job
from farcall.observe.reading.state import JobState, WorkerState
from farcall.observe.why.analysis import analyze, severity

__all__ = ["Choice", "choose_job"]

_FRESH_SECONDS: Final = 30.0
"""Time in seconds since its last heartbeat for which a worker that is not visible from here counts as living.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """A job that was chosen.

    Attributes:
        job: its folder.
        others: the other live jobs, described for people; empty if the job was named.
    """

    job: JobFolder
    others: tuple[str, ...] = ()

    def tell(self, say: Callable[[str], object]) -> None:
        """Say which other jobs live, if any do."""
        if self.others:
            runs = "another that runs" if len(self.others) == 1 else "others that run"
            say(f"shown: job {self.job.id}; --job NAME shows {runs}: {', '.join(self.others)}")


def choose_job(folder: Path, given: str | None) -> Choice:
    """Find a job by its name or the beginning of it; without one, the default.

    Raises:
        LookupError: there is none, or there are several; the text names them.
    """
    if given is not None:
        return Choice(find_job(folder, given))
    found = [(each, read_job(each)) for each in jobs(folder) if _may_live(each)]
    living = [(each, job) for each, job in found if any(map(_lives, job))]
    if len(living) < 2:
        return Choice(living[0][0] if living else find_job(folder, None))
    living.sort(key=lambda each: (severity(analyze(each[1])), -each[1].began, each[0].id))
    (chosen, _), *others = living
    return Choice(chosen, tuple(_described(job) for _, job in others))


def _may_live(job: JobFolder) -> bool:
    """Whether a worker of a job may live, by its files alone: to read all jobs would take long."""
    now = time.time()
    for path in job.state_files():
        process = path.stem.split(".")[-2:][0]
        with contextlib.suppress(FileNotFoundError):  # it was moved to the folder of another job
            if os.path.exists(f"/proc/{process}") or now - path.stat().st_mtime < _FRESH_SECONDS:
                return True
    return False


def _lives(worker: WorkerState) -> bool:
    if worker.has_left or worker.process.alive is False:
        return False
    return bool(worker.process.alive) or worker.silent < _FRESH_SECONDS


def _described(job: JobState) -> str:
    program = next((str(each.fact("program")) for each in job if each.fact("program")), "")
    return f"{job.id} ({program})" if program else job.id
