"""What ``farcall launch`` writes to the folder of its job: where the workers' output is, and how it ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

from farcall.observe.format.job_files import read_facts, write_facts
from farcall.observe.format.jobs import make_private
from farcall.observe.reading.reader import END
from farcall.observe.reading.state import JobState

__all__ = ["is_over", "note_end", "note_launch", "read_launch"]

_FILE: Final = "launch.json"


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


def is_over(folder: Path, job: JobState) -> bool:
    """Whether a job has ended: its launcher has noted that, or is gone, and so are all workers."""
    if job.end:
        return True
    launch = read_launch(folder)
    runs = launch.get("host") != socket.gethostname() or os.path.exists(f"/proc/{launch.get('pid')}")
    return not (job.living or (launch and runs))
