"""``farcall trace``: has the workers of a job on this host record, and merges what they leave."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Final

import click

from farcall.observe.jobs import JobFolder
from farcall.observe.orders import give_order
from farcall.observe.reader import read_job
from farcall.observe.tracing import merge_files, write_trace

__all__ = ["trace_job"]

_SECONDS_TO_LEAVE: Final = 30.0
"""Maximum time to wait for workers to write their parts, in seconds."""


def trace_job(job: JobFolder, seconds: float, output: str) -> str:
    """Trace a job on this host; returns a line that says what was written.

    Raises:
        click.ClickException: nothing of the job runs, or no worker has left its part.
    """
    here = socket.gethostname()
    alive = [worker for worker in read_job(job).living if worker.host == here]
    if not alive:
        raise click.ClickException(f"no worker of job {job.id} runs on this host")
    with tempfile.TemporaryDirectory(prefix="farcall-trace-") as folder:
        give_order(job.path, "trace", seconds=seconds, parts=folder)
        time.sleep(seconds)
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        while len(list(Path(folder).glob("*.part"))) < len(alive) and time.monotonic() < deadline:
            time.sleep(0.1)
        found = len(list(Path(folder).glob("*.part")))
        made = merge_files(Path(folder))
    if not found:
        raise click.ClickException(f"no worker of job {job.id} has answered within {_SECONDS_TO_LEAVE:.0f} s")
    write_trace(Path(output), made)
    return f"{output}: {found} of {len(alive)} workers, {len(made['traceEvents'])} events"
