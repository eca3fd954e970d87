"""``farcall trace``: makes the workers of a job on this host record, and merges their parts."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Final

import click

from farcall.observe.format.jobs import JobFolder
from farcall.observe.format.orders import give_order
from farcall.observe.reading.processes import signs_of
from farcall.observe.reading.reader import read_job
from farcall.observe.trace.merge import merge
from farcall.observe.tracing import BEGUN, parts_in, write_trace

__all__ = ["trace_job"]

_SECONDS_TO_BEGIN: Final = 1.5
"""Maximum time in seconds until a worker finds the order."""

_SECONDS_TO_LEAVE: Final = 30.0
"""Maximum time in seconds to wait for workers to write their parts."""

_SECONDS_OF_STOPPED: Final = 1.0
"""Time in seconds to wait for workers that are stopped or dead, once all others have written."""

_INTERVAL: Final = 0.05


def trace_job(job: JobFolder, seconds: float, output: str) -> list[str]:
    """Trace a job on this host; returns lines that say what was written, and whose part is missing.

    Raises:
        click.ClickException: nothing of the job runs, no worker has left its part, or the trace cannot be
            written.
    """
    here = socket.gethostname()
    awaited = {worker.pid: worker.name for worker in read_job(job).living if worker.host == here}
    if not awaited:
        raise click.ClickException(f"no worker of job {job.id} runs on this host")
    try:
        with tempfile.TemporaryDirectory(prefix="farcall-trace-") as name:
            folder = Path(name)
            until = time.time() + _SECONDS_TO_BEGIN + seconds
            give_order(job.path, "trace", until=until, parts=name)
            workers = f"{len(awaited)} worker{'' if len(awaited) == 1 else 's'}"
            click.echo(f"tracing {workers} of job {job.id} for {seconds:g} s", err=True)
            time.sleep(max(0.0, until - time.time()))
            begun = _numbers(folder, BEGUN)
            _wait_for(folder, begun.intersection(awaited))
            parts = parts_in(folder)
            missing = [
                _why(process, awaited[process], has_begun=process in begun)
                for process in sorted(set(awaited) - _left(folder))
            ]
            if not parts:
                reasons = ", ".join(missing)
                raise click.ClickException(f"no worker of job {job.id} has left its part: {reasons}")
            count = write_trace(Path(output), merge(parts, missing))
    except OSError as error:
        raise click.ClickException(f"the trace cannot be written: {error}") from error
    found = len(awaited) - len(missing)
    lines = [f"{output}: {found} of {len(awaited)} workers, {count} events"]
    return lines + [f"missing: {each}" for each in missing]


def _wait_for(folder: Path, awaited: set[int]) -> None:
    """Wait until all processes have written their parts, or cannot."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < _SECONDS_TO_LEAVE:
        missing = awaited - _left(folder)
        if not missing or (passed > _SECONDS_OF_STOPPED and not any(map(_runs, missing))):
            return
        time.sleep(_INTERVAL)


def _left(folder: Path) -> set[int]:
    """Return the processes that have written a part."""
    return _numbers(folder, ".part")


def _numbers(folder: Path, suffix: str) -> set[int]:
    """Return the processes that have written a file with a suffix."""
    numbers = [path.name.partition(".")[0] for path in folder.glob(f"*{suffix}")]
    return {int(number) for number in numbers if number.isdecimal()}


def _runs(process: int) -> bool:
    signs = signs_of(process)
    return signs is not None and not signs.is_stopped


def _why(process: int, worker: str, *, has_begun: bool) -> str:
    signs = signs_of(process)
    if signs is None:
        reason = "it has died"
    elif signs.is_stopped:
        reason = "it is stopped"
    elif not has_begun:
        reason = "it has not begun to record: its interpreter may be blocked, see `farcall stacks`"
    else:
        reason = f"it has not answered within {_SECONDS_TO_LEAVE:.0f} s"
    return f"{worker or 'a worker'} (process {process}): {reason}"
