"""Starts all workers of a script on this machine, and sees to it that they end together.

The workers are started as one would by hand: the same script, with ``--rank``, ``--world-size`` and
``--init-method``. If one fails, the others get a moment to notice, then they are ended.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

__all__ = ["run_on_this_machine"]

GRACE = 1.0
"""Seconds that the other workers have to end by themselves once one has failed."""

_SHOW_CURSOR = "\x1b[?25h"


def run_on_this_machine(script: str, names: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs one process per worker until all have ended.

    Args:
        script: the path of the script to run.
        names: of the workers, by rank.
        arguments: the command line, passed on to each.

    Returns:
        The exit status: 0 if all workers succeeded, 130 after Ctrl-C, else 1.
    """
    print(f"Starting {', '.join(names)} on this machine.", flush=True)
    with tempfile.TemporaryDirectory(prefix="farcall-") as folder, _terminated_like_interrupted():
        meeting = ["--world-size", str(len(names)), "--init-method", f"file://{folder}/rendezvous"]
        commands = [
            [sys.executable, script, *arguments, "--rank", str(rank), *meeting] for rank in range(len(names))
        ]
        workers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, command in zip(names, commands, strict=True):
                workers[name] = subprocess.Popen(command)
            return _watch(workers)
        except KeyboardInterrupt:
            _end(workers)
            print("interrupted", file=sys.stderr)
            return 130
        finally:
            _end(workers)
            if sys.stdout.isatty():  # a worker that was killed may have left it hidden
                print(_SHOW_CURSOR, end="", flush=True)


def _watch(workers: dict[str, subprocess.Popen[bytes]]) -> int:
    """Waits for all workers, or for one to fail; says which failed, and how."""
    while not (failed := _failed(workers)):
        if all(worker.poll() == 0 for worker in workers.values()):
            return 0
        time.sleep(0.05)
    _wait(workers, GRACE)
    failed = _failed(workers)
    _end(workers)
    for name in sorted(failed, key=lambda name: failed[name]):  # deaths by a signal first
        print(f"{name} (process {workers[name].pid}) {_how(failed[name])}", file=sys.stderr)
    return 1


def _failed(workers: dict[str, subprocess.Popen[bytes]]) -> dict[str, int]:
    return {name: status for name, worker in workers.items() if (status := worker.poll())}


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"


def _end(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    """Ends what still runs."""
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for worker in workers.values():
            end(worker)  # does nothing if the process has ended
        _wait(workers, GRACE)


def _wait(workers: dict[str, subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    for worker in workers.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the workers too, as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
