"""What a launcher says, and what its processes leave behind for it when they fail.

A process that raises writes a record where its launcher looks, so that one summary can name the failure that
was the cause, with its traceback. Imports nothing heavy: each worker's process needs it before its program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Failure", "name_ranks", "record", "say"]

_LOSS: Final = "WorkerLostError"


@dataclass(frozen=True, slots=True)
class Failure:
    """How one process has failed.

    Attributes:
        rank: of the worker.
        pid: its process.
        status: as ``subprocess`` has it: the exit status, or the negative number of the signal that ended it.
        at: when, in seconds since 1970.
        message: what it has raised, on one line; "" if it left no record.
        trace: the traceback of that.
    """

    rank: int
    pid: int
    status: int
    at: float
    message: str = ""
    trace: str = ""

    @classmethod
    def of(cls, rank: int, pid: int, status: int, at: float, file: str) -> Failure:
        """With what the process has recorded, if it has."""
        try:
            left = json.loads(Path(file).read_text())
        except FileNotFoundError:
            return cls(rank, pid, status, at)
        return cls(rank, pid, status, left["at"], left["message"], left["trace"])

    @classmethod
    def first(cls, failures: Iterable[Failure]) -> Failure:
        """The one that is most likely the cause of the others."""
        return min(failures, key=lambda failure: (failure._rarely_a_cause(), failure.at))

    def _rarely_a_cause(self) -> int:
        if self.message:
            return 2 if self.message.startswith(_LOSS) else 1
        return 4 if self.status == -signal.SIGTERM else 0 if self.status < 0 else 3

    @property
    def exit_status(self) -> int:
        """What a shell would report."""
        if self.message:
            return 1
        return self.status if self.status > 0 else 128 - self.status

    @property
    def what(self) -> str:
        """What has happened to it."""
        if self.message:
            return f"raised {self.message}"
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"

    def sum_up(self, remark: str = "") -> None:
        """Print the one summary of a job that has failed."""
        say(f"rank {self.rank} (process {self.pid}) failed first{remark}: it {self.what}")
        if self.trace:
            print(self.trace.rstrip(), file=sys.stderr, flush=True)


def record(error: BaseException, trace: str) -> None:
    """In a process: leave behind what it has raised, where its launcher looks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        written = Path(f"{file}.{os.getpid()}")
        try:
            written.write_text(json.dumps({"at": time.time(), "message": said, "trace": trace}))
            written.replace(file)  # as a whole: this process may be ended at any moment
        except OSError as failure:  # what was raised is shown all the same
            say(f"cannot write {written} for the launcher: {failure.strerror}")


def name_ranks(ranks: Sequence[int]) -> str:
    """``ranks 0 to 3``, for people; ``rank 0`` if it is one."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {min(ranks)} to {max(ranks)}"


def say(text: str) -> None:
    """One line of the launcher's own, beside those of its workers."""
    print(f"farcall: {text}", file=sys.stderr, flush=True)
