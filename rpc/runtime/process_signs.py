"""The kernel's view of another process on this host: whether it is stopped, or busy."""

from __future__ import annotations

import contextlib
import errno
import os
import select
from dataclasses import dataclass
from typing import Final

__all__ = [
    "UNKNOWN",
    "ProcessSigns",
    "computes",
    "has_ended",
    "has_own_proc",
    "process_signs",
    "start_time",
    "stat_fields",
    "waited_for_core",
]

_STATE, _FLAGS, _UTIME, _STIME, _START = 0, 6, 11, 12, 19  # in /proc/PID/stat, behind the name (proc(5))
_BUSY: Final = frozenset("RD")
_STOPPED: Final = frozenset("Tt")
_EXITING: Final = 0x4  # PF_EXITING, which the kernel sets before it takes memory and sockets away
_CANNOT_LOOK: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class ProcessSigns:
    """The state of a process at one moment.

    Attributes:
        stopped: whether it is stopped by a signal, or a debugger.
        busy: whether a thread runs, or waits for a core or a disk.
        ticks: CPU time of all its threads, in the kernel's clock ticks.
        start: start time, which distinguishes it from a later process with the same id.
    """

    stopped: bool
    busy: bool
    ticks: int
    start: int


UNKNOWN: Final = ProcessSigns(stopped=False, busy=True, ticks=0, start=0)
"""The state of a process that this one cannot look at, as it lacks file descriptors or memory."""


def process_signs(process: int) -> ProcessSigns | None:
    """Return the state of a process, or ``UNKNOWN``; None if there is none, or it is not in this PID
    namespace.
    """
    try:
        fields = stat_fields(f"/proc/{process}/stat")
        states = {fields[_STATE]}
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):  # it has just ended
                states.add(stat_fields(f"/proc/{process}/task/{thread}/stat")[_STATE])
        ticks = int(fields[_UTIME]) + int(fields[_STIME])
        return ProcessSigns(fields[_STATE] in _STOPPED, bool(states & _BUSY), ticks, int(fields[_START]))
    except OSError as error:
        return UNKNOWN if error.errno in _CANNOT_LOOK else None
    except MemoryError:
        return UNKNOWN
    except (ValueError, IndexError):
        return None


def has_ended(process: int) -> bool:
    """Return whether a process of this PID namespace runs no code any more: it has ended, whether or not its
    parent has waited for it, or the kernel is ending it, which closes its sockets before its parent can wait.
    """
    try:
        descriptor = os.pidfd_open(process)
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0)) or (has_own_proc() and _is_ending(process))
    finally:
        os.close(descriptor)


def start_time(process: int) -> int | None:
    """Return the start time of a process, which distinguishes it from a later one with the same id, in the
    kernel's clock ticks; None if there is none in ``/proc``. Raises ``OSError``.
    """
    try:
        return int(stat_fields(f"/proc/{process}/stat")[_START])
    except (FileNotFoundError, ProcessLookupError):
        return None


def has_own_proc() -> bool:
    """Whether ``/proc`` has the processes of this PID namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _is_ending(process: int) -> bool:
    """Whether no thread of a process returns from the kernel any more."""
    folder = f"/proc/{process}/task"
    try:
        threads = os.listdir(folder)
        if not all(_thread_is_ending(f"{folder}/{each}/stat") for each in threads):
            return False
        return set(threads).issuperset(os.listdir(folder))  # none of them has started another before
    except OSError:
        return False


def _thread_is_ending(path: str) -> bool:
    try:
        return bool(int(stat_fields(path)[_FLAGS]) & _EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def computes(before: ProcessSigns | None, now: ProcessSigns | None) -> bool:
    """Whether it is the same process, which has run in the meantime, or is ready to run. True also if one of
    the two is unknown: a process is not held to be gone because this one could not look.
    """
    if before is UNKNOWN or now is UNKNOWN:
        return True
    if before is None or now is None or now.start != before.start or now.stopped:
        return False
    return now.busy or now.ticks > before.ticks


def waited_for_core() -> float:
    """Return for how many seconds the calling thread has been ready to run, and waited for a core, since it
    started; 0 if the kernel does not provide it.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def stat_fields(path: str) -> list[str]:
    """Return the fields behind the name in a file ``stat`` of ``/proc`` (proc(5)). Raises ``OSError``."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
