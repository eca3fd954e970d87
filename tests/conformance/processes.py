"""Runs a function in a few forked processes, within a time limit, and says how it ended.

Meant for a parent with one thread. Everything a worker prints, the traceback of its error and, when it
hangs, the stacks of its threads go to a log of its own. Workers are waited for through pid descriptors
and killed by pid, and die with their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

__all__ = ["Body", "Ending", "Outcome", "Pool"]

T = TypeVar("T")
Body = Callable[[T, int, Path], None]
"""Gets the task, the worker's rank and the task's folder; raises ``SkipTest`` or what is wrong."""

_FAILED, _SKIPPED = 10, 86
_PR_SET_PDEATHSIG = 1
_SECONDS_AFTER_A_FAILURE = 3.0
_SECONDS_FOR_STACKS = 1.0


class Ending(Enum):
    """How a task ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A finished task.

    Attributes:
        task: what was run.
        ending: how it ended.
        seconds: how long it took.
        exits: each worker's exit status, or minus the signal that ended it.
        logs: what each worker wrote.
    """

    task: T
    ending: Ending
    seconds: float
    exits: tuple[int, ...]
    logs: tuple[str, ...]

    def complaint(self) -> str:
        """The last line of the first worker that failed by itself, or the first to have been killed."""
        for fine in ((0, _SKIPPED, -signal.SIGKILL), (0,)):
            for rank, status in enumerate(self.exits):
                if status not in fine:
                    lines = self.logs[rank].strip().splitlines()
                    return f"worker {rank}: {lines[-1] if lines else f'ended with {status}'}"
        return ""


@dataclass
class _Run(Generic[T]):
    task: T
    folder: Path
    workers: int
    started: float
    deadline: float
    pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    stacks_asked: bool = False
    late: bool = False


class Pool(Generic[T]):
    """Runs tasks, each in forked processes of its own.

    Args:
        body: what each worker runs.
        folder: logs and the tasks' own files go to subfolders of it.
        workers: how many processes a task takes.
        jobs: tasks at one time.
        limit: seconds a task may take; then its workers' stacks are logged and it is killed.

    Example::

        pool = Pool(body, Path(folder), workers=lambda test: 4, jobs=2, limit=60)
        for outcome in pool.run(tests):
            print(outcome.task, outcome.ending.value)
    """

    def __init__(
        self, body: Body[T], folder: Path, workers: Callable[[T], int], jobs: int, limit: float
    ) -> None:
        self._body = body
        self._folder = folder
        self._workers = workers
        self._jobs = jobs
        self._limit = limit
        self._selector = selectors.DefaultSelector()
        self._runs: list[_Run[T]] = []

    def run(self, tasks: Iterable[T]) -> Iterable[Outcome[T]]:
        """Yields outcomes as tasks end. Leaving the loop early kills what still runs."""
        waiting = list(tasks)[::-1]
        number = 0
        try:
            while waiting or self._runs:
                while waiting and len(self._runs) < self._jobs:
                    number += 1
                    self._runs.append(self._start(waiting.pop(), self._folder / f"{number:03}"))
                self._reap()
                for run in list(self._runs):
                    self._press(run)
                    if len(run.exits) == run.workers:
                        self._runs.remove(run)
                        yield self._outcome(run)
        finally:
            for run in self._runs:
                self._kill(run)

    def _start(self, task: T, folder: Path) -> _Run[T]:
        folder.mkdir(parents=True)
        now = time.monotonic()
        run = _Run(task, folder, self._workers(task), now, now + self._limit)
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(run.workers):
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._be_worker(run, rank, parent)
            run.pids[rank] = pid
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (run, rank))
        return run

    def _be_worker(self, run: _Run[T], rank: int, parent: int) -> NoReturn:
        status = _FAILED
        try:
            _die_with(parent)
            _write_to(_log(run, rank))
            os.environ["TMPDIR"] = str(run.folder)
            self._body(run.task, rank, run.folder)
            status = 0
        except unittest.SkipTest as skip:
            print(skip, flush=True)
            status = _SKIPPED
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            # As an interpreter ends, so that programs which never shut down are tested as such.
            with contextlib.suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        """Takes note of the workers that have ended, waiting a moment for the first."""
        for key, _ in self._selector.select(timeout=0.1):
            run, rank = key.data
            _, status = os.waitpid(run.pids[rank], 0)
            run.exits[rank] = os.waitstatus_to_exitcode(status)
            self._selector.unregister(key.fd)
            os.close(key.fd)
            if run.exits[rank] not in (0, _SKIPPED):
                run.deadline = min(run.deadline, time.monotonic() + _SECONDS_AFTER_A_FAILURE)

    def _press(self, run: _Run[T]) -> None:
        """Past its deadline: first ask the workers for their stacks, then kill them."""
        now = time.monotonic()
        if now < run.deadline or len(run.exits) == run.workers:
            return
        if run.stacks_asked:
            self._kill(run)
            return
        run.late = now >= run.started + self._limit
        run.stacks_asked = True
        run.deadline = now + _SECONDS_FOR_STACKS
        self._signal(run, signal.SIGUSR1)

    def _signal(self, run: _Run[T], number: signal.Signals) -> None:
        for rank, pid in run.pids.items():
            if rank not in run.exits:
                os.kill(pid, number)

    def _kill(self, run: _Run[T]) -> None:
        self._signal(run, signal.SIGKILL)
        run.deadline = float("inf")

    def _outcome(self, run: _Run[T]) -> Outcome[T]:
        exits = tuple(run.exits[rank] for rank in range(run.workers))
        if all(status == 0 for status in exits):
            ending = Ending.PASSED
        elif all(status in (0, _SKIPPED) for status in exits):
            ending = Ending.SKIPPED
        else:
            ending = Ending.TIMED_OUT if run.late else Ending.FAILED
        logs = tuple(_log(run, rank).read_text(errors="replace") for rank in range(run.workers))
        return Outcome(run.task, ending, time.monotonic() - run.started, exits, logs)


def _log(run: _Run[T], rank: int) -> Path:
    return run.folder / f"worker{rank}.log"


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_FAILED)


def _write_to(log: Path) -> None:
    """Standard output, error and dumped stacks all go to the log; there is no standard input."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
