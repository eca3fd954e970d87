"""What tests must not leave behind: processes, threads, listening sockets, segments, temporary files.

The session takes a :class:`Snapshot` before its first test and fails if there is anything more after its
last one (see ``conftest.py``). Around a single piece of work the same check reads::

    with leftovers.nothing_left():
        rpc.init_rpc(...)
        rpc.shutdown()

Processes count if they descend from pytest's own: it is their subreaper, so an orphan is still found.
Temporary files count if they lie in ``TMPDIR``, which is the session's own. All of this reads ``/proc``, so
elsewhere than on Linux only threads and files are looked at.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_PATIENCE = 15.0  # seconds that things may take to vanish after they were told to
_PAUSE = 0.02
_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_OUR_SEGMENTS = re.compile(r"farcall|torch_|psm_")
_PYTORCHS_CACHE = "torchinductor_"  # made, empty, by whatever makes an optimizer
_LISTEN_TCP = "0A"
_LISTEN_UNIX = 0x10000  # __SO_ACCEPTCON

SERVERS: Final[set[int]] = set()
"""Processes of the session itself, which are no leftovers: servers that fork workers and programs."""


class LeftBehind(AssertionError):
    """Something was left behind; the message has one line for each."""


@dataclass(frozen=True)
class Process:
    """A running process; the start time tells it from a later one with the same id."""

    pid: int
    started: int
    command: str = field(compare=False)

    def __str__(self) -> str:
        return f"process {self.pid}: {self.command}"

    def kill(self) -> None:
        """``SIGKILL``, unless it has ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Snapshot:
    """What is there now; :meth:`leftovers` says later what has come since."""

    def __init__(self) -> None:
        self._processes = set(descendants())
        self._threads = set(threading.enumerate())
        self._sockets = _listening_sockets()
        self._segments = _segments()
        self._files = _files()

    def leftovers(self, patience: float = _PATIENCE) -> list[str]:
        """One line for each thing that is there now and was not then.

        Args:
            patience: seconds to wait for what is still about to vanish.
        """
        gc.collect()  # the thread of gRPC ends with the last of its objects, and some are in cycles
        until = time.monotonic() + patience
        while (found := self._new()) and time.monotonic() < until:
            time.sleep(_PAUSE)
        return found

    def _new(self) -> list[str]:
        return [
            *map(str, set(descendants()) - self._processes),
            *(f"thread {thread.name!r}" for thread in set(threading.enumerate()) - self._threads),
            *(f"listening socket {name}" for name in _listening_sockets() - self._sockets),
            *(f"segment {name}" for name in _segments() - self._segments),
            *(f"temporary file {path}" for path in _files() - self._files),
        ]


@contextlib.contextmanager
def nothing_left(patience: float = _PATIENCE) -> Iterator[None]:
    """Checks that a piece of work leaves nothing of what this module looks at.

    Args:
        patience: seconds to wait for what is still about to vanish.

    Raises:
        LeftBehind: something is left then.
    """
    before = Snapshot()
    yield
    if found := before.leftovers(patience):
        raise LeftBehind("left behind:\n" + "\n".join(found))


_TRACKER = "multiprocessing.resource_tracker"
"""Ends when this process does; the first process that ``multiprocessing`` spawns starts it."""


def processes(patience: float = _PATIENCE) -> list[Process]:
    """Descendants of this process that run on, however long one waits, without its servers."""
    until = time.monotonic() + patience
    while True:
        found = [process for process in descendants() if process.pid not in SERVERS]
        if not found or time.monotonic() > until:
            return found
        time.sleep(_PAUSE)


def descendants() -> list[Process]:
    """Every living process that descends from this one."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile
                fields = _status(int(name))
                if fields[0] not in "ZX":
                    children.setdefault(int(fields[1]), []).append((int(name), int(fields[19])))
    found: list[Process] = []
    parents = [os.getpid()]
    while parents:
        for pid, started in children.get(parents.pop(), []):
            if _TRACKER not in (command := _command(pid)):
                found.append(Process(pid, started, command))
            parents.append(pid)
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"{_PROC}/{pid}/cmdline", errors="replace") as file:
        return file.read(200).replace("\0", " ").strip()
    return ""


def process_state(pid: int) -> str:
    """The letter that ``ps`` shows: ``S`` asleep, ``T`` stopped, ``Z`` ended; ``X`` if there is none."""
    try:
        return _status(pid)[0]
    except OSError:
        return "X"


def _status(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the command, which may contain anything."""
    with open(f"{_PROC}/{pid}/stat", errors="replace") as file:  # for every process, after every test
        return file.read().rpartition(")")[2].split()


def _listening_sockets() -> set[str]:
    """Sockets of this very process that listen, Unix (abstract ones begin with ``@``) and TCP."""
    own = {target for target in _open_descriptors() if target.startswith("socket:[")}
    names = set()
    for table, kind in (("tcp", "TCP"), ("tcp6", "TCP6")):
        for fields in _table(_PROC / "self/net" / table):
            if fields[3] == _LISTEN_TCP and f"socket:[{fields[9]}]" in own:
                names.add(f"{kind} port {int(fields[1].rpartition(':')[2], 16)} (inode {fields[9]})")
    for fields in _table(_PROC / "self/net/unix"):
        if int(fields[3], 16) & _LISTEN_UNIX and f"socket:[{fields[6]}]" in own:
            names.add(f"Unix {fields[7] if len(fields) > 7 else ''} (inode {fields[6]})")
    return names


def _segments() -> set[str]:
    """Shared memory: named segments of this kind of program, and memfds that this process holds."""
    names = set()
    if _SHARED_MEMORY.is_dir():
        names = {str(path) for path in _SHARED_MEMORY.iterdir() if _OUR_SEGMENTS.match(path.name)}
    names |= {target for target in _open_descriptors() if target.startswith("/memfd:")}
    with contextlib.suppress(OSError):
        lines = (_PROC / "self/maps").read_text().splitlines()
        names |= {line[line.index("/memfd:") :] for line in lines if "/memfd:" in line}
    return names


def _files() -> set[str]:
    folder = Path(tempfile.gettempdir())
    if not folder.is_dir():
        return set()
    return {str(path) for path in folder.iterdir() if not path.name.startswith(_PYTORCHS_CACHE)}


def _open_descriptors() -> list[str]:
    targets = []
    with contextlib.suppress(OSError):
        for entry in (_PROC / "self/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(os.readlink(entry))
    return targets


def _table(path: Path) -> list[list[str]]:
    with contextlib.suppress(OSError):
        return [line.split() for line in path.read_text().splitlines()[1:]]
    return []
