"""Finds the processes of this host that listen on TCP ports, by the kernel's tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Final

__all__ = ["listening_processes"]

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_LOCAL, _STATE, _INODE = 1, 3, 9  # columns, see proc(5)
_LISTENS: Final = "0A"


def listening_processes(ports: Collection[int] | None = None) -> dict[int, int]:
    """Return the process that listens on each port, as far as this process may know that: not if it belongs
    to another user, or is in another PID namespace.

    Args:
        ports: which ports; None for all.
    """
    sockets: dict[str, int] = {}
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                columns = line.split()
                if len(columns) > _INODE and columns[_STATE] == _LISTENS:
                    port = int(columns[_LOCAL].rpartition(":")[2], 16)
                    if ports is None or port in ports:
                        sockets[f"socket:[{columns[_INODE]}]"] = port
    found: dict[int, int] = {}
    for process, descriptor in _descriptors() if sockets else ():
        with contextlib.suppress(OSError):  # it has just been closed
            port = sockets.pop(os.readlink(descriptor), 0)
            if port:
                found[port] = process
        if not sockets:
            break
    return found


def _descriptors() -> Iterator[tuple[int, str]]:
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                yield int(process), f"/proc/{process}/fd/{descriptor}"
