"""Which users of this host have connected to a port of loopback, as the kernel lists their sockets."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

__all__ = ["connecting_users"]

_SOCKETS: Final = "/proc/net/tcp"
_LOOPBACK: Final = "0100007F" if sys.byteorder == "little" else "7F000001"


def connecting_users(port: int) -> dict[int, int]:
    """Return the number of the user by the port of a connection's other end. A connection that the kernel
    does not list is missing.

    Args:
        port: the port that is listened on.
    """
    found: dict[int, int] = {}
    wanted = f"{_LOOPBACK}:{port:04X}"
    with contextlib.suppress(OSError), open(_SOCKETS, encoding="ascii") as sockets:
        for line in sockets:
            fields = line.split()
            if len(fields) > 7 and fields[2] == wanted:
                found[int(fields[1].rpartition(":")[2], 16)] = int(fields[7])
    return found
