"""The worker processes of one machine: their start, the signals that they get, and their end.

Each leads a process group of its own. Signals that end it, and those that are passed on, go to the worker
alone, so that a program that saves its state keeps its helpers meanwhile. When the worker has ended, or its
time is over, the rest of its group is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from farcall.launch.failures import Failure, signal_name
from farcall.launch.output import Output
from farcall.launch.terminal import name_ranks, ranks_run, say
from rpc.runtime.interrupts import interrupts_blocked
from rpc.runtime.notices import Notices

__all__ = ["Guard", "WorkerProcess", "WorkerProcesses"]


class Guard:
    """The process that ends the workers if this one is killed. (``guard.py`` describes it.)"""

    def __init__(self, grace: float) -> None:
        command = [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(grace)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, sign: str, pid: int) -> None:
        """Report that a worker has been started (``+``) or has ended (``-``)."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{sign}{pid}\n".encode())
        except BrokenPipeError:  # it was killed; workers are still ended by this process
            return

    def close(self) -> None:
        """End it: there are no workers any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class WorkerProcess:
    """One worker: its process, or several processes one after the other if it is restarted.

    Args:
        rank: rank in the job.
        command: the program to run, with its arguments.
        folder: folder for the record of its failure.
        output: reads its streams. Without a guard they go to the output's file instead, since the worker must
            survive if this process is killed.
        guard: ends it if this process is killed; None if it must survive.
        host: name of this machine, for its failures; "" if there is only one.

    Attributes:
        failure: failure of its last process; None if it runs, or has succeeded.
        starts: number of its processes so far.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        folder: Path,
        output: Output,
        guard: Guard | None,
        *,
        host: str = "",
    ) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self._command = list(command)
        self._folder = folder
        self._output = output
        self._guard = guard
        self._host = host
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: tuple[int, ...] = ()
        self._record = folder
        self._is_ending = False

    @property
    def runs(self) -> bool:
        """Whether it has a process that has not been seen to end."""
        return self._process is not None

    def start(
        self,
        environment: Mapping[str, str],
        take_spare: Callable[[Mapping[str, str]], subprocess.Popen[bytes] | None] | None = None,
    ) -> None:
        """Start a process.

        Args:
            environment: variables beside those of this process.
            take_spare: given the environment, returns a process that runs the program in it, or None.

        Raises:
            OSError: the process cannot be started.
        """
        self.failure, self._is_ending = None, False
        self.starts += 1
        self._record = self._folder / f"rank{self.rank}-{self.starts}.json"
        file = self._output.log_file(self.rank)
        if file is not None and self.starts > 1:
            # If the disk is full, the thread that writes the output logs it.
            with contextlib.suppress(OSError), open(file, "a") as log:
                log.write(f"farcall: start {self.starts} of rank {self.rank}\n")
        environment = {**environment, "FARCALL_ERROR_FILE": str(self._record)}
        self._process = None if take_spare is None else take_spare(environment)
        target: int | IO[bytes] = subprocess.PIPE
        with contextlib.ExitStack() as opened:
            if self._guard is None and file is not None:
                target = opened.enter_context(open(file, "ab"))
            if self._process is None:
                opened.enter_context(interrupts_blocked())
                self._process = subprocess.Popen(
                    self._command,
                    env={**os.environ, **environment},
                    stdout=target,
                    stderr=target,
                    start_new_session=True,
                )
        if self._guard is not None:
            self._guard.tell("+", self._process.pid)
        self._pipes = self._output.follow(self.rank, self._process) if target == subprocess.PIPE else ()

    def poll(self) -> bool:
        """Whether its process has ended since the last call; ``failure`` has the reason if it failed."""
        if self._process is None or (status := self._process.poll()) is None:
            return False
        pid, self._process = self._process.pid, None
        if status or self._is_ending:
            _kill_group(pid)
        self._output.ended(self._pipes)
        if self._guard is not None:
            self._guard.tell("-", pid)
        if status:
            self.failure = Failure.of(self.rank, pid, status, self._record, self._host)
        return True

    def wait(self) -> None:
        """Wait until its process, which was killed, has ended."""
        if self._process is not None:
            self._process.wait()
            self.poll()

    def send(self, number: int) -> None:
        """Send a signal to its process, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, number: int) -> None:
        """Send the signal that ends it; once it has ended, the rest of its group is killed."""
        self._is_ending = True
        self.send(number)

    def kill(self) -> None:
        """Kill its process, and all others in its group."""
        self._is_ending = True
        if self._process is not None:
            _kill_group(self._process.pid)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class WorkerProcesses:
    """The workers of this machine, and the progress of their end. For one thread.

    Args:
        workers: the workers, by rank.
        grace: time in seconds from the signal that ends a worker to SIGKILL.
    """

    def __init__(self, workers: Sequence[WorkerProcess], grace: float) -> None:
        self._workers = workers
        self._grace = grace
        self._ended_by = 0
        self._kill_at = math.inf
        self._notices = Notices()

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start all workers; none runs.

        Args:
            environments: environment variables by rank.
        """
        self._ended_by, self._kill_at = 0, math.inf
        for worker in self._workers:
            worker.start(environments[worker.rank])

    @property
    def running(self) -> list[int]:
        """Ranks of the workers that run."""
        return [worker.rank for worker in self._workers if worker.runs]

    def ended_here(self, *, with_grace: bool = False) -> str:
        """Return what happens to the workers that run, for the end of a line."""
        if not (running := self.running):
            return ""
        limit = f" in {self._grace:g} s at most" if with_grace else ""
        return f"; {ranks_run(running, 'still')} here, to be ended{limit}"

    @property
    def failures(self) -> list[Failure]:
        """Failures of workers since they were started."""
        return [worker.failure for worker in self._workers if worker.failure is not None]

    @property
    def want_requeue(self) -> bool:
        """Whether all that have failed did so to be run again later."""
        return bool(self.failures) and all(failure.wants_requeue for failure in self.failures)

    def poll(self) -> list[WorkerProcess]:
        """Return the workers that have ended since the last call. Those that do not end in time are
        killed.
        """
        ended = [worker for worker in self._workers if worker.poll()]
        if self._ended_by and (running := self.running):
            left, signalled = self._kill_at - time.monotonic(), signal_name(self._ended_by)
            if left <= 0:
                say(f"{name_ranks(running)} still ran {self._grace:g} s after {signalled} (--grace): killed")
                self.kill()
            elif self._notices.due():
                say(
                    f"{ranks_run(running, 'still')} {self._notices.waited} after {signalled}; killed "
                    f"in {left:.0f} s"
                )
        return ended

    def send(self, number: int) -> None:
        """Send a signal to all that run."""
        for worker in self._workers:
            worker.send(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End all that run, the first time that this is called after their start."""
        if not self._ended_by:
            self._ended_by, self._kill_at = number, time.monotonic() + self._grace
            self._notices = Notices()
            for worker in self._workers:
                worker.end(number)

    def kill(self) -> None:
        """Kill all that run."""
        self._kill_at = math.inf
        for worker in self._workers:
            worker.kill()
