"""The output of workers in the files that ``farcall launch --log-dir`` keeps: its end, and what follows.

Beside ``rank0.log`` is ``rank0.times``: positions in it, and the times at which the launcher wrote there.
"""

from __future__ import annotations

import bisect
import os
import struct
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from farcall.observe.format.job_files import open_file
from farcall.observe.format.legible import legible
from farcall.observe.reading.launches import read_launch
from farcall.observe.reading.state import WorkerState

__all__ = ["KeptOutput", "LogTimes"]

_TAIL_BYTES: Final = 1 << 20
_NEW_BYTES: Final = 1 << 16
_TIME: Final = struct.Struct("<Qd")
_APART_SECONDS: Final = 0.01
"""Minimum difference in seconds of two times that are noted."""


class LogTimes:
    """Notes the times at which a file of output is written. For one thread.

    Args:
        log: the file of output.

    Raises:
        OSError: the file for the times cannot be made.
    """

    def __init__(self, log: Path) -> None:
        self._file = open(log.with_suffix(".times"), "ab", buffering=0)  # noqa: SIM115
        self._noted = 0.0

    def note(self, position: int) -> None:
        """Note that output is written now, at this position. Raises ``OSError``."""
        now = time.time()
        if abs(now - self._noted) >= _APART_SECONDS:
            self._noted = now
            self._file.write(_TIME.pack(position, now))


class KeptOutput:
    """The output of a job's workers. For one thread.

    Args:
        folder: folder of the job.

    Raises:
        LookupError: no launcher has kept it.
    """

    def __init__(self, folder: Path) -> None:
        kept = read_launch(folder).get("log_dir")
        if not isinstance(kept, str):
            raise LookupError("the output of this job was not kept: give `farcall launch` a --log-dir")
        self._folder = Path(kept)
        self._ends: dict[int, int] = {}
        """Positions up to which the workers' files have been read, by rank."""

    def last_of_each(self, workers: Sequence[WorkerState], count: int) -> Iterator[str]:
        """Return the last lines of each worker, each with the worker's name."""
        for worker in workers:
            for _, line in self._last(worker, count):
                yield line

    def last_by_time(self, workers: Sequence[WorkerState], count: int) -> list[str]:
        """Return the last lines of all workers together, in the order in which they were printed."""
        lines = [line for worker in workers for line in self._last(worker, count)]
        return [text for _, text in sorted(lines, key=itemgetter(0))[-count:]]

    def new(self, workers: Sequence[WorkerState]) -> Iterator[str]:
        """Return the whole lines that have been written since this object has last read a worker's file."""
        for worker in workers:
            try:
                yield from self._new(worker)
            except OSError:  # it has not printed anything yet, or the files were deleted
                continue

    def _path(self, worker: WorkerState) -> Path:
        return self._folder / f"rank{worker.rank}.log"

    def _last(self, worker: WorkerState, count: int) -> list[tuple[float, str]]:
        """Return a worker's last lines with their times."""
        path = self._path(worker)
        try:
            begin, data = _tail(path)
        except OSError as error:
            return [(0.0, f"{worker.name}: {path}: {error.strerror}")]
        lines, at = [], begin
        for line in data.splitlines(keepends=True):
            lines.append((at, line))
            at += len(line)
            if line.endswith((b"\n", b"\r")):
                self._ends[worker.rank] = at
        shown = lines[-count:]
        times = _times(path.with_suffix(".times"), [at for at, _ in shown])
        return [(time, _shown(worker, line)) for time, (_, line) in zip(times, shown, strict=True)]

    def _new(self, worker: WorkerState) -> Iterator[str]:
        with open_file(self._path(worker)) as file:
            size = os.fstat(file.fileno()).st_size
            end = self._ends.get(worker.rank, 0)
            end = end if end <= size else 0  # the file is another one
            rest = b""
            file.seek(end)
            while read := file.read(min(_NEW_BYTES, size - file.tell())):
                *whole, rest = (rest + read).split(b"\n")
                for line in whole:
                    end += len(line) + 1
                    yield _shown(worker, line)
                self._ends[worker.rank] = end


def _tail(path: Path) -> tuple[int, bytes]:
    """Return the end of a file, and its position. Raises ``OSError``."""
    with open_file(path) as file:
        begin = max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES)
        file.seek(begin)
        return begin, file.read(_TAIL_BYTES)


def _times(path: Path, positions: Sequence[int]) -> list[float]:
    """Return when what is at these positions was written; 0 if that is not known."""
    try:
        begin, data = _tail(path)
    except OSError:
        return [0.0] * len(positions)
    data = data[-begin % _TIME.size :]
    noted = sorted(_TIME.iter_unpack(data[: len(data) // _TIME.size * _TIME.size]))
    indices = (bisect.bisect_right(noted, position, key=itemgetter(0)) - 1 for position in positions)
    return [noted[max(0, index)][1] if noted else 0.0 for index in indices]


def _shown(worker: WorkerState, line: bytes) -> str:
    text = legible(line.rstrip(b"\r\n").decode(errors="replace"), kept="\t")
    return f"{worker.name}  {text}"
