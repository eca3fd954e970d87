"""The processes that a process has started, and those that these have started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

__all__ = ["descendants", "kill"]

Process = tuple[int, str]
"""A process: its id, and when it began, since another one may get its id."""


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the descendants of some processes, without trackers of ``multiprocessing``, which end by
    themselves and clean up after the others.
    """
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (found := _stat(int(folder.name))) is not None:
            parent, began = found
            children.setdefault(parent, []).append((int(folder.name), began))
    found_all: list[Process] = []
    waiting = list(pids)
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child[0])
            if not _is_tracker(child[0]):
                found_all.append(child)
    return found_all


def kill(processes: Iterable[Process]) -> None:
    """Kill those that are still running."""
    for pid, began in processes:
        found = _stat(pid)
        if found is not None and found[1] == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[int, str] | None:
    """Return the parent of a process and when it began; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), fields[19]


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
