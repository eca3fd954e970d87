"""Reads one job again and again, on a thread, and keeps what the page shows of it.

A look costs CPU time in proportion to the number of workers. So looks are rarer where they are dear, and
while nobody watches; the end of a worker's process here is seen at once by its descriptor
(``pidfd_open(2)``), which costs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from farcall.observe.format.jobs import JobFolder
from farcall.observe.reading.gathered import gather
from farcall.observe.reading.reader import read_job
from farcall.observe.reading.state import JobState
from farcall.observe.why.analysis import Report, analyze
from farcall.page.task_stream import TaskStream
from farcall.page.view import PastJob, job_view, past_job, point_of

__all__ = ["Watched", "Watcher"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
"""Minimum time between two looks while somebody watches, in seconds."""

_UNWATCHED_SECONDS: Final = 15.0
"""Time between two looks while nobody watches, in seconds."""

_MAX_SHARE: Final = 0.1
"""Maximum share of a core that looks take."""

_MAX_LOOK_SECONDS: Final = 10.0
"""Maximum time between two looks while somebody watches, in seconds."""

_AFTER_END_SECONDS: Final = 0.2
"""Time after the end of a process until the next look, in seconds: others may end with it."""

_GATHER_SECONDS: Final = 10.0
"""Minimum time between two questions to other hosts, in seconds."""

MAX_POINTS: Final = 600
"""Maximum number of points that are kept; the newest."""

Point = tuple[float, float, float, float, int]
"""Time in seconds since 1970, calls and requests per second, cores in use, bytes of memory."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A job at one look.

    Attributes:
        number: of the look, from 1.
        view: see ``job_view``.
        report: the job, and what was found out about it.
    """

    number: int
    view: dict[str, Any]
    report: Report

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.report.job


class Watcher:
    """Watches one job. Methods may be called from any thread.

    Args:
        folder: of the job.
        changed: called after each look, on the watching thread.
    """

    def __init__(self, folder: JobFolder, changed: Callable[[], object]) -> None:
        self.folder = folder
        self._changed = changed
        self._lock = threading.Lock()
        self._watched: Watched | None = None
        self._tasks = TaskStream()
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._viewers = 0
        self._stopping = False
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._processes: dict[int, int] = {}
        """Descriptors of the workers' processes here, by process number."""
        self._gathered = 0.0
        self._thread = threading.Thread(target=self._run, name=f"farcall-page-{folder.id}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopping = True
        self._wake_up()
        self._thread.join()
        for descriptor in (self._woken, self._wake, *self._processes.values()):
            os.close(descriptor)

    def add_viewer(self, count: int = 1) -> int:
        """Somebody watches from now on, or with -1 no more; returns how many do."""
        with self._lock:
            self._viewers += count
            viewers = self._viewers
        if count > 0:
            self._wake_up()
        return viewers

    @property
    def watched(self) -> Watched | None:
        """The last look."""
        return self._watched

    def tasks_since(self, version: int) -> tuple[int, list[list[Any]]]:
        """The version of the newest task, and the tasks that have changed after a version, for the page."""
        with self._lock:
            return self._tasks.version, [each.to_json() for each in self._tasks.since(version)]

    def points_since(self, at: float) -> list[Point]:
        """The points after a time."""
        with self._lock:
            return [each for each in self._points if each[0] > at]

    def past_job(self) -> PastJob | None:
        """How the job is, for the history."""
        watched = self._watched
        return None if watched is None else past_job(watched.report)

    # ---- the thread

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)  # the job goes first
        while not self._stopping:
            began = time.thread_time()
            try:
                self._look()
            except Exception:  # the next look may succeed
                logger.exception("looking at job %s failed", self.folder.id)
            self._changed()
            self._pause(time.thread_time() - began)

    def _pause(self, cost: float) -> None:
        """Wait until the next look: for the time that the cost of the last one makes due, until a process has
        ended, or until somebody watches.
        """
        interval = min(max(_LOOK_SECONDS, cost / _MAX_SHARE), _MAX_LOOK_SECONDS)
        if not self._viewers:
            interval = max(interval, _UNWATCHED_SECONDS)
        poll = select.poll()
        for descriptor in (self._woken, *self._processes.values()):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(interval * 1000)}
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        ended = [number for number, descriptor in self._processes.items() if descriptor in ready]
        for number in ended:
            os.close(self._processes.pop(number))
        if ended and not self._stopping:
            time.sleep(_AFTER_END_SECONDS)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def _look(self) -> None:
        before = self._watched
        is_due = self._viewers and time.monotonic() - self._gathered > _GATHER_SECONDS
        if before is not None and is_due and _has_far(before.job):
            gather(self.folder.path, before.job)
            self._gathered = time.monotonic()
        job = read_job(self.folder)
        report = analyze(job)
        view = job_view(job, report, None if before is None else before.job)
        at = time.time()
        with self._lock:
            self._tasks.follow(job)
            if job.living:
                self._points.append((round(at, 3), *point_of(view["workers"])))
        view["at"] = at
        self._watched = Watched(1 if before is None else before.number + 1, view, report)
        self._follow_processes(job)

    def _follow_processes(self, job: JobState) -> None:
        """Have descriptors of the processes that live here."""
        here = socket.gethostname()
        alive = {each.pid for each in job if each.host == here and each.process.alive}
        for number in set(self._processes) - alive:
            os.close(self._processes.pop(number))
        for number in alive - set(self._processes):
            # It has ended, this kernel is too old, or it is no process number: looks see it.
            with contextlib.suppress(OSError, OverflowError):
                self._processes[number] = os.pidfd_open(number)


def _has_far(job: JobState) -> bool:
    return any(peer.get("near") is False and "lost" not in peer for each in job for peer in each.peers[:64])
