"""The test's handle on one worker process: its events, its signals, its end, and why it failed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle

from tests.support import leftovers
from tests.support.worker_context import WorkerSpec

if TYPE_CHECKING:
    from tests.support.workers import Workers


_LOG_LINES = 300


@dataclass(frozen=True)
class Failure:
    """Why one worker failed; ``error`` is its exception, where there is one that could be sent."""

    worker: str
    reason: str
    details: str = ""
    error: BaseException | None = None


class WorkersFailed(Exception):
    """At least one worker of a run raised, crashed, or hung.

    Attributes:
        failures: one for each, those that failed by themselves first.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        parts = [f"{failure.worker}: {failure.reason}\n{failure.details}".rstrip() for failure in failures]
        super().__init__("\n\n".join(parts))


class WorkerProcess:
    """The test's handle on one worker."""

    def __init__(self, run: Workers, spec: WorkerSpec, channel: Connection[Any, Any], pid: int) -> None:
        self.name = spec.name
        self.rank = spec.rank
        self.pid = pid
        self.log = spec.folder / f"{spec.name}.log"
        self.exit_status: int | None = None
        self.death_intended = False
        self.returned: list[Any] = []  # the value, once there is one
        self.raised: tuple[BaseException | None, str] | None = None
        self._run = run
        self._channel = channel
        self._events: defaultdict[str, deque[Any]] = defaultdict(deque)

    def wait_for(self, event: str) -> Any:
        """Waits until this worker does ``worker.report(event, value)`` and returns that value.

        Each report is returned once, in order.

        Raises:
            WorkersFailed: a worker failed, or this one ended without reporting, or time is up.
        """
        __tracebackhide__ = True
        events = self._events[event]
        self._run.pump_until(lambda: bool(events) or self.ended, f"{self.name} reports {event!r}")
        if not events:
            raise WorkersFailed([Failure(self.name, f"ended without reporting {event!r}", self.output())])
        return events.popleft()

    def restart_clock(self) -> None:
        """The time limit of its run counts from now."""
        self._run.restart_clock()

    def tell(self, event: str, value: object = None) -> None:
        """Releases this worker from ``worker.wait_for(event)``, which returns the value."""
        self._channel.send_bytes(cloudpickle.dumps((event, value)))

    def kill(self) -> None:
        """``kill -9``; that this worker has no result is then no failure."""
        self.death_intended = True
        self.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Suspends the process (``SIGSTOP``): its sockets stay open and nothing answers.

        Returns once it stands still.
        """
        self.signal(signal.SIGSTOP)
        while not self.ended and leftovers.process_state(self.pid) not in "TZX":
            time.sleep(0.001)
            self._run.server_news()

    def resume(self) -> None:
        """Lets a stopped process go on."""
        self.signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """What Ctrl-C does (``SIGINT``)."""
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Sends any signal, unless the process has ended."""
        self._run.server_news()
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def result(self) -> Any:
        """Waits for this worker's end and returns what its function returned (``None`` if killed).

        Raises:
            WorkersFailed: a worker failed, this or another, or time is up.
        """
        __tracebackhide__ = True
        self._run.pump_until(lambda: self.ended, f"{self.name} ends")
        return self.returned[0] if self.returned else None

    @property
    def ended(self) -> bool:
        """Whether the process is gone, as far as the test has heard."""
        return self.exit_status is not None

    def output(self) -> str:
        """The end of what the worker has printed, stacks of its threads included if it was aborted."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "".join(f"  | {line}\n" for line in lines[-_LOG_LINES:])

    def log_lines(self) -> list[str]:
        """The lines that the worker has printed, without those about long waits, as a loaded machine has."""
        return [line for line in self.log.read_text().splitlines() if " has waited " not in line]

    @property
    def channel(self) -> Connection[Any, Any]:
        """The connection that :class:`Workers` reads."""
        return self._channel

    def read(self) -> None:
        """Takes in what this worker has sent, up to what is there now."""
        try:
            while not self._channel.closed and self._channel.poll(0):
                self._take(cloudpickle.loads(self._channel.recv_bytes()))
        except (EOFError, OSError):  # also in the middle of a message
            self._channel.close()

    def end(self, exit_status: int) -> None:
        """The process has ended; nothing more will come."""
        self.read()
        self._channel.close()
        self.exit_status = exit_status

    def failure(self) -> Failure | None:
        """Why this worker has failed, if it has."""
        if self.raised is not None:
            error, text = self.raised
            return Failure(self.name, f"raised\n{text}", self.output(), error)
        if self.exit_status is None or self.death_intended or (self.exit_status == 0 and self.returned):
            return None
        when = "after returning" if self.returned else "before returning"
        if self.exit_status < 0:
            reason = f"was killed by {signal.Signals(-self.exit_status).name} {when}"
        else:
            reason = f"exited with status {self.exit_status} {when}"
        return Failure(self.name, reason, self.output())

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("event", name, value):
                self._events[name].append(value)
            case ("returned", value):
                self.returned.append(value)
            case ("raised", error, text):
                self.raised = (error, text)
            case ("dying",):
                self.death_intended = True
