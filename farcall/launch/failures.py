"""Failures of processes of ``farcall launch``, and the records that they leave for their launcher.

A process that raises writes a record to the file that its launcher has named, so that one summary can name
the failure that was the cause, with its traceback. Imports nothing heavy, since each worker's process needs
it before its program.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sysconfig
import textwrap
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farcall.launch.terminal import say
from farcall.observe.format.positions import Position
from farcall_guard import PACKAGES
from rpc.runtime.current import is_initialized
from rpc.runtime.preemption import REQUEUE_STATUS
from rpc.runtime.tracebacks import shows_all

__all__ = ["Failure", "is_loss", "is_of_pytorchs_rpc", "record", "shown_by", "signal_name"]

_FILE: Final = "FARCALL_ERROR_FILE"
"""Environment variable that names the file for the record."""

_RECORD: Final = re.compile(r"^rank(\d+)-(\d+)\.json$")
"""Name of the file: the rank, and how often its process has been started."""

_SHOWN: Final = 80
"""Maximum number of characters of an exception in the summary; the process has printed all of them."""

_PYTORCHS_RPC: Final = re.compile(r"/torch/distributed/(rpc|autograd|nn/api|optim)/[^/]*$")
"""Files of PyTorch's own RPC."""

_LOSSES: Final = {("rpc.errors", "WorkerLostError"), ("spmd.collectives.errors", "RankLostError")}
"""Modules and names of the errors that tell of another process's end."""

_LINE: Final = re.compile(r'File "(.*)", line (\d+)')
_RECENT_SECONDS: Final = 60.0
"""Age in seconds up to which the traceback that another process has printed is referred to."""
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_OURS: Final = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in PACKAGES)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one process.

    Attributes:
        rank: rank of the worker.
        pid: process number.
        status: as in ``subprocess``: the exit status, or the negative number of the signal that ended it.
        at: time of the failure, in seconds since 1970.
        message: the exception, on one line; "" if the process left no record.
        trace: traceback of the exception.
        host: name of the machine if there are several; otherwise "".
        is_loss: whether the exception tells of another process's end.
    """

    rank: int
    pid: int
    status: int
    at: float
    message: str = ""
    trace: str = ""
    host: str = ""
    is_loss: bool = False

    @classmethod
    def of(cls, rank: int, pid: int, status: int, file: Path, host: str = "") -> Failure:
        """Return the failure of a process that has just ended, with its record if it left one."""
        try:
            left = json.loads(file.read_text())
        except FileNotFoundError:
            return cls(rank, pid, status, time.time(), host=host)
        return cls(rank, pid, status, left["at"], left["message"], left["trace"], host, left["is_loss"])

    @classmethod
    def first(cls, failures: Iterable[Failure]) -> Failure:
        """Return the failure that is most likely the cause of the others."""
        return min(failures, key=lambda failure: (failure._rarely_a_cause(), failure.at))

    @property
    def wants_requeue(self) -> bool:
        """Whether the process has saved its state because the job is preempted, and must be run again."""
        return self.status == REQUEUE_STATUS and not self.message

    def _rarely_a_cause(self) -> int:
        if self.message:
            return 3 if self.is_loss else 1
        if self.wants_requeue:
            return 2
        return 5 if self.status == -signal.SIGTERM else 0 if self.status < 0 else 4

    @property
    def exit_status(self) -> int:
        """The status that a shell would report."""
        if self.message:
            return 1
        return self.status if self.status > 0 else 128 - self.status

    @property
    def process(self) -> str:
        """Rank and process, as text."""
        return f"rank {self.rank} (process {self.pid}{f' on {self.host}' if self.host else ''})"

    @property
    def place(self) -> Position | None:
        """The innermost position in the program's own code that the traceback shows."""
        found = [(file, int(line), name) for file, line, name in _FRAME.findall(self.trace)]
        own = [each for each in found if not _is_library(each[0])] or found
        if not own:
            return None
        file, line, name = own[-1]
        return Position(name, file.removeprefix(os.path.join(os.getcwd(), "")), line)

    @property
    def what(self) -> str:
        """Text that says what happened to the process."""
        if self.message:
            error = textwrap.shorten(self.message, _SHOWN, placeholder=" ...")
            return f"raised {error}{f' ({self.place})' if self.place else ''}"
        if self.wants_requeue:
            return f"has saved its state, to be run again later (status {self.status})"
        if self.status < 0:
            return f"was killed by {signal_name(-self.status)}"
        return f"ended with status {self.status}"

    def sum_up(self, remark: str = "") -> None:
        """Print the one summary of a job that has failed, or is preempted. The process itself has printed its
        traceback.
        """
        if self.wants_requeue:
            say(f"preempted: {self.process} {self.what}")
            return
        say(f"{self.process} failed first{remark}: it {self.what}")


def is_loss(error: BaseException) -> bool:
    """Whether an error of ours tells of another process's end."""
    return not _LOSSES.isdisjoint((kind.__module__, kind.__name__) for kind in type(error).__mro__)


def is_of_pytorchs_rpc(error: BaseException) -> bool:
    """Whether PyTorch's own RPC has raised an error in a process that has an agent of farcall."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _PYTORCHS_RPC.search(frames[-1]) is not None and is_initialized()


def record(error: BaseException, trace: str) -> None:
    """Write a record of an exception for the launcher, in a worker's process."""
    file = os.environ.get(_FILE)
    if file:
        said = " ".join(f"{type(error).__name__}: {_text(error)}".split())[:1000]
        written = Path(f"{file}.{os.getpid()}")
        left = {"at": time.time(), "message": said, "trace": trace, "is_loss": is_loss(error)}
        try:
            written.write_text(json.dumps(left))
            written.replace(file)  # in one step: this process may be ended at any moment
        except OSError as failure:  # the exception itself is printed in any case
            say(f"cannot write {written} for the launcher: {failure.strerror}")


def shown_by(error: BaseException, trace: str) -> str | None:
    """Return the rank of another process of this launcher that has just raised an error of this type through
    the same lines, and so prints this traceback; None if this is the first process that does.

    Args:
        error: the exception.
        trace: its traceback, with those of its causes and of other workers.
    """
    file = os.environ.get(_FILE)
    if not file or shows_all():
        return None
    rank, start = _RECORD.findall(os.path.basename(file))[0]
    lines = _LINE.findall(trace)
    digest = hashlib.sha256(repr((type(error).__qualname__, lines)).encode()).hexdigest()
    note = os.path.join(os.path.dirname(file), f"traceback-{start}-{digest[:32]}")
    try:
        if os.path.lexists(note) and time.time() - os.lstat(note).st_mtime > _RECENT_SECONDS:
            return None
        os.symlink(rank, note)  # made with its content, in one step
    except FileExistsError:
        return os.readlink(note)
    except OSError:  # the disk may be full: the traceback is printed
        return None
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the program's own __str__; tracebacks have these words, too
        return "<exception str() failed>"


def _is_library(file: str) -> bool:
    """Whether code of this file is not the program's own."""
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(os.__file__))
    return file.startswith((*_OURS, *standard, "<"))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``, or ``signal 40`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
