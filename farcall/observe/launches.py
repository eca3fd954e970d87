"""What ``farcall launch`` writes to the folder of its job: where the workers' output is."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from farcall.observe.job_files import open_file, read_facts, write_facts
from farcall.observe.jobs import make_private
from farcall.observe.reader import END
from farcall.observe.state import WorkerState

__all__ = ["log_ends", "note_end", "note_launch", "read_launch"]

_FILE: Final = "launch.json"
_TAIL_BYTES: Final = 1 << 20


def note_launch(folder: Path, **facts: Any) -> None:
    """Write what a launcher knows. Does nothing if that is impossible."""
    with contextlib.suppress(OSError):
        make_private(folder)
        write_facts(folder / _FILE, facts)
        (folder / END).unlink(missing_ok=True)


def note_end(folder: Path, status: int, failure: str) -> None:
    """Write how a job has ended. Does nothing if that is impossible.

    Args:
        status: exit status of the launcher.
        failure: what the process that failed first did; "" if none failed.
    """
    with contextlib.suppress(OSError):
        write_facts(folder / END, {"status": status, "failure": failure, "ended": time.time()})


def read_launch(folder: Path) -> dict[str, Any]:
    """Read what the launcher of a job has written; empty if there was none."""
    return read_facts(folder / _FILE)


def log_ends(folder: Path, workers: Sequence[WorkerState], count: int) -> Iterator[str]:
    """Return the last lines of what workers have printed, each with the worker's name.

    Raises:
        LookupError: no launcher has kept it.
    """
    kept = read_launch(folder).get("log_dir")
    if not isinstance(kept, str):
        raise LookupError("the output of this job was not kept: give `farcall launch` a --log-dir")
    for worker in workers:
        path = Path(kept) / f"rank{worker.rank}.log"
        try:
            with open_file(path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                ends = deque(file.read(_TAIL_BYTES).decode(errors="replace").splitlines(), count)
        except OSError as error:
            yield f"{worker.name}: {path}: {error.strerror}"
            continue
        for line in ends:
            shown = "".join(each if each.isprintable() or each == "\t" else repr(each)[1:-1] for each in line)
            yield f"{worker.name}  {shown}"
