"""The processes that a process has started, and those that these have started.

The kernel forgets who started a process when its parent dies. So a process can be *marked* with the path of
a file: it keeps the file open, as its forked children do, and names it in its environment, which the
programs that it starts inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from rpc.runtime.process_signs import stat_fields

__all__ = ["descendants", "kill", "mark", "marked"]

_VARIABLE: Final = "FARCALL_STARTED_BY"
"""Environment variable with the marks of a program's ancestors."""

Process = tuple[int, str]
"""A process: its id, and when it began, since another one may get its id."""


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the descendants of some processes, without trackers of ``multiprocessing``, which end by
    themselves and clean up after the others.
    """
    waiting = list(pids)
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").iterdir() if waiting else ():
        if folder.name.isdecimal() and (found := _stat(int(folder.name))) is not None:
            parent, began = found
            children.setdefault(parent, []).append((int(folder.name), began))
    found_all: list[Process] = []
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child[0])
            if not _is_tracker(child[0]):
                found_all.append(child)
    return found_all


def mark(path: str) -> None:
    """Mark this process, and those that it starts from now on, with the path of a new file."""
    os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)  # never closed
    os.environ[_VARIABLE] = os.pathsep.join(filter(None, (os.environ.get(_VARIABLE), path)))


def marked(paths: Collection[str]) -> list[Process]:
    """Return the processes that are marked with one of the paths, except this one and trackers of
    ``multiprocessing``.
    """
    found: list[Process] = []
    for folder in Path("/proc").iterdir() if paths else ():
        if folder.name.isdecimal() and (pid := int(folder.name)) != os.getpid():
            stat = _stat(pid)
            if stat is not None and _bears(folder, paths) and not _is_tracker(pid):
                found.append((pid, stat[1]))
    return found


def _bears(folder: Path, paths: Collection[str]) -> bool:
    """Whether the process with this folder in /proc is marked with one of the paths."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        environment = (folder / "environ").read_bytes()
        if any(os.fsencode(path) in environment for path in paths):
            return True
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) in paths:
                    return True
    return False


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
        fields = stat_fields(f"/proc/{pid}/stat")
    except OSError:
        return None
    return int(fields[1]), fields[19]


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
