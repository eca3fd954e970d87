r"""A launcher's observer of its job, which prints by itself what the workers wait for.

A summary is printed when nothing has moved for a minute, again at growing intervals, and on SIGQUIT
(``Ctrl-\``). When a worker fails, the waits of the others are noted before they are ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from farcall.launch.failures import Failure
from farcall.launch.job import Job
from farcall.launch.page_process import PageProcess
from farcall.launch.terminal import say
from farcall.observe.format.jobs import JOB, find_job, jobs_folder
from farcall.observe.reading.launches import note_end, note_launch
from farcall.observe.reading.reader import read_job
from farcall.observe.reading.state import JobState, Process, WorkerState
from farcall.observe.why.analysis import Report, analyze
from farcall.observe.why.silent_processes import last_place
from farcall.observe.why.words import in_words, waiting_in_words
from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError

__all__ = ["JobWatch"]

_LOOK_SECONDS: Final = 5.0
_STILL_SECONDS: Final = 60.0
"""Time in seconds without movement after which a summary is printed."""

_WIDTH: Final = 100

_OF_RENDEZVOUS: Final = tuple(
    f"{each.__name__}:" for each in (GroupMismatchError, RendezvousError, RendezvousTimeoutError)
)


class JobWatch:
    """Observes one job. For one thread.

    Args:
        job: the job.
        program: name of the program, for people.
    """

    def __init__(self, job: Job, program: str) -> None:
        self.id = ""
        self._job = job
        self._program = program
        self._folder = jobs_folder(os.environ)
        self._next = time.monotonic() + _STILL_SECONDS
        self._interval = _STILL_SECONDS
        self._look_at = self._next
        self._at_failure: JobState | None = None
        self._noted = False
        self._page: PageProcess | None = None

    def begin(self, job_id: str) -> None:
        """Begin: the job has a name in the folder of all jobs."""
        self.id = job_id
        job = self._job
        log_dir = None if job.log_dir is None else str(Path(job.log_dir).absolute())
        note_launch(
            self._folder / job_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            program=self._program,
            workers=job.workers,
            log_dir=log_dir,
            began=time.time(),
        )
        if job.page and self._page is None:
            self._page = PageProcess(job_id)

    def close(self) -> None:
        """End the page: the job is over."""
        if self._page is not None:
            self._page.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the workers."""
        return {JOB: self.id}

    def look(self) -> None:
        """Print a summary, if nothing has moved in the job for long. To be called often."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        report = self._report()
        if report is None or not report.job.living or report.job.quiet < _STILL_SECONDS:
            self._interval, self._next = _STILL_SECONDS, now
        elif report.job.still >= _STILL_SECONDS and now >= self._next:
            self._say(report)
            self._interval *= 2
            self._next = now + self._interval

    def sum_up(self) -> None:
        """Print a summary now."""
        report = self._report()
        if report is None:
            say("no worker has said yet what it does")
        else:
            self._say(report)

    def failed(self, failures: Sequence[Failure]) -> None:
        """Note what all workers do, since some have failed, and the others will be ended. Only the first call
        counts.
        """
        if failures and not self._noted:
            self._noted = True
            self._at_failure = self._state()

    def restarted(self) -> None:
        """Record that all workers run again."""
        self._noted, self._at_failure = False, None

    def explain(self, failure: Failure) -> None:
        """Print where a worker was that left no record, and what the others waited for then."""
        if self._at_failure is None:
            return
        job = self._at_failure.as_of(failure.at)
        worker = next((each for each in job if each.rank == failure.rank), None)
        if worker is not None and failure.place is None and (place := last_place(worker)) is not None:
            say(f"{worker.name} was last seen in {place.function}, at {place}")
        ended = [replace(each, process=Process(alive=False)) if each is worker else each for each in job]
        report = analyze(replace(job, workers=tuple(ended)))
        formed = any(
            _has_joined(each)
            for each in self._at_failure
            if each.process.alive or each.pid == failure.pid  # not one of an earlier round
        )
        told = failure.message.startswith(_OF_RENDEZVOUS)  # by each rank
        for line in waiting_in_words(report, {failure.rank}, rendezvous=not (formed or told)):
            say(line)

    def ended(self, status: int, failure: Failure | None) -> None:
        """Note how the job has ended, for the commands that look at it later."""
        if self.id:
            text = "" if failure is None else f"{failure.process} {failure.what}"
            note_end(self._folder / self.id, status, text)

    def _state(self) -> JobState | None:
        if not self.id:
            return None
        try:
            job = read_job(find_job(self._folder, self.id))
        except LookupError:
            return None
        return job if job.workers else None

    def _report(self) -> Report | None:
        job = self._state()
        return None if job is None else analyze(job)

    def _say(self, report: Report) -> None:
        for line in self._lines(report):
            say(line)

    def _lines(self, report: Report) -> Iterator[str]:
        yield from in_words(report, _WIDTH)
        yield f"farcall why --job {self.id} says more"


def _has_joined(worker: WorkerState) -> bool:
    """Whether a worker has been in a static group, all of whose workers were at the rendezvous then."""
    return bool(worker.fact("static", False)) and worker.phase in ("running", "leaving", "left")
