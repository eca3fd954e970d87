"""What the kernel reports of the processes of workers.

Reading state files must not take the seconds that importing PyTorch takes, and everything under ``rpc``
imports it; so this does not use ``rpc.runtime.process_signs``.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Signs", "ask_for_stacks", "core_waits", "signs_of", "start_of"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_STATE, _UTIME, _STIME, _START, _RSS = 0, 11, 12, 19, 21  # in /proc/PID/stat, behind the name (proc(5))
_ASLEEP: Final = ("S", "D")
"""States of a waiting thread, most likely for a lock."""


@dataclass(frozen=True, slots=True)
class Signs:
    """A process at one moment.

    Attributes:
        start: time when it began, in clock ticks since boot: distinguishes it from a later one with the same
            number.
        state: state of its main thread: one letter, as in ``ps``.
        seconds: CPU time that it has used.
        memory: resident memory, in bytes.
        tracer: process number of its debugger; 0 if there is none.
        catches: the signals that it handles, as a bit mask.
    """

    start: int
    state: str
    seconds: float
    memory: int
    tracer: int
    catches: int

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


def signs_of(process: int) -> Signs | None:
    """Return what is visible of a process; None if it does not exist, or is a zombie."""
    try:
        fields = _stat(f"/proc/{process}/stat")
        text = Path(f"/proc/{process}/status").read_text(errors="replace")
        if fields[_STATE] in "ZX":
            return None
        status = dict(line.partition(":")[::2] for line in text.splitlines())
        return Signs(
            int(fields[_START]),
            fields[_STATE],
            (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS,
            int(fields[_RSS]) * _PAGE,
            int(status.get("TracerPid", "0")),
            int(status.get("SigCgt", "0").strip(), 16),
        )
    except (OSError, ValueError, IndexError):
        return None


def start_of(process: int) -> int:
    """Return when a process began, as in ``Signs``; 0 if it does not exist."""
    signs = signs_of(process)
    return 0 if signs is None else signs.start


def core_waits(process: int) -> dict[str, float]:
    """Seconds for which each thread of a process has waited for a core so far; empty if that is unknown."""
    found: dict[str, float] = {}
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/schedstat", encoding="ascii") as file:
                found[thread] = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return {}
    return found


def ask_for_stacks(process: int, thread: int, signs: Signs, number: int) -> bool:
    """Make a process write its stacks: send the signal for it to its observing thread.

    Nothing is sent if the process does not handle the signal, which would then end it, or if the thread waits
    for a core, and not for the interpreter lock.
    """
    if not 0 < number <= signal.SIGRTMAX or not signs.catches >> (number - 1) & 1:
        return False
    try:
        state = _stat(f"/proc/{process}/task/{thread}/stat")[_STATE]
    except (OSError, IndexError):
        return False
    return state in _ASLEEP and _tgkill(process, thread, number) == 0


def _stat(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()


def _tgkill(process: int, thread: int, number: int) -> int:
    """Send a signal to one thread (tgkill(2)); returns 0 if that was possible."""
    library = ctypes.CDLL(None)
    return int(library.tgkill(process, thread, number)) if hasattr(library, "tgkill") else -1
