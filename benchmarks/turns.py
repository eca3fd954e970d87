"""A side's worker processes, and the turns in which both sides measure, batch by batch.

A machine's speed varies from second to second, by a factor of two where others use it too. So what is
compared lies as close in time as can be: while one side runs a batch, the other waits for its turn. Its
processes are stopped meanwhile, since idle ones may take a core: TensorPipe's look for messages all the time.
(Workloads that do not measure in batches, such as what an idle agent uses, take one turn as a whole.)

Workers are forked from a parent that has imported torch only: that takes milliseconds where a new interpreter
takes seconds to import torch. The parent must not start threads: a child would have the locks that they held.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

__all__ = ["Failure", "Workers", "pass_on", "take_turns", "work_by_turns"]

_LEAVE_SECONDS: Final = 5.0
_DETAIL_LINES: Final = 12


Work = Callable[[int, Path, Connection], None]


@dataclass(frozen=True)
class Failure:
    """Why a side has no number: a word or two for the table, and what the worker had to say."""

    reason: str
    details: str = ""


_referee: list[Connection] = []
"""In the worker that measures: where it is told that it is its turn."""


def pass_on() -> None:
    """Between two batches: let the other side measure, and return when it is this side's turn again."""
    for connection in _referee:
        connection.send(None)
        connection.recv()


def work_by_turns(connection: Connection, measure: Callable[[str], float | Failure]) -> None:
    """In the worker that measures: measure the workloads that the parent names, until it names none."""
    _referee.append(connection)
    while (name := connection.recv()) is not None:
        connection.send(measure(name))


class Workers:
    """The processes of one side: the first measures, the others serve it.

    Args:
        work: runs in each: takes its rank, a folder that all share and the first one's connection to here.
        count: how many there are.
    """

    def __init__(self, work: Work, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory(prefix="farcall-bench-")
        self._connection, theirs = context.Pipe()
        arguments = [(rank, Path(self._folder.name), theirs) for rank in range(count)]
        self._processes = [context.Process(target=_start, args=(work, *each)) for each in arguments]
        for process in self._processes:
            process.start()
        theirs.close()
        self._signal(signal.SIGSTOP)

    def turn(self, message: str | None, seconds: float) -> float | Failure | None:
        """Let them run until they pass on (``None``), have measured or have failed."""
        self._signal(signal.SIGCONT)
        try:
            self._connection.send(message)
            if not wait([self._connection, *(process.sentinel for process in self._processes)], seconds):
                return Failure("hung", self._said())
            return self._connection.recv() if self._connection.poll() else self._died()
        except (EOFError, OSError):
            return self._died()
        finally:
            self._signal(signal.SIGSTOP)

    def end(self, *, kill: bool = False) -> None:
        """End them, by force unless they leave by themselves."""
        self._signal(signal.SIGKILL if kill else signal.SIGCONT)
        with contextlib.suppress(OSError):  # it has ended
            self._connection.send(None)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        self._connection.close()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def _died(self) -> Failure:
        for process in self._processes:
            process.join(0.1)
        code = next((process.exitcode for process in self._processes if process.exitcode), 0)
        return Failure(f"died ({signal.Signals(-code).name if code < 0 else code})", self._said())

    def _said(self) -> str:
        """The end of what each has written to its standard error."""
        files = sorted(Path(self._folder.name).glob("stderr-*"))
        lines = [path.read_text(errors="replace").splitlines()[-_DETAIL_LINES:] for path in files]
        return "\n".join(line for each in lines for line in each)


def _start(work: Work, rank: int, folder: Path, parent: Connection) -> None:
    """Warnings and logs of whatever a side uses go to a file, which is shown if it fails."""
    written = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 2)
    if rank != 0:
        parent.close()
    work(rank, folder, parent)


def take_turns(sides: Mapping[str, Workers], workload: str, limit: float) -> dict[str, float | Failure]:
    """Let all sides measure a workload, a batch each in turn.

    Args:
        sides: by name.
        workload: its name.
        limit: seconds that one side's turns may take together.
    """
    outcomes: dict[str, float | Failure] = {}
    left = dict.fromkeys(sides, limit)
    message: str | None = workload
    while left:
        for side, seconds in list(left.items()):
            begin = time.monotonic()
            outcome = sides[side].turn(message, max(0.0, seconds))
            left[side] -= time.monotonic() - begin
            if outcome is not None:
                outcomes[side] = outcome
                del left[side]
        message = None
    return outcomes
