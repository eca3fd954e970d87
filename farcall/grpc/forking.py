"""gRPC and ``os.fork``: a child can use neither its parent's gRPC objects nor new ones.

gRPC's threads do not exist in the child, and may have held its locks. So nothing of it is called or freed
there. What the child must do is close the descriptors, since the parent's connections last as long as they
do, and the other side would not notice that the parent has died. gRPC does not tell which they are; they are
found by their addresses.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from typing import Any, Final

from rpc.errors import ForkedProcessError

__all__ = ["Place", "abandon", "begin", "place"]

Place = tuple[str, int]
"""Address and port."""

# gRPC's own handling of forks starts threads in the child, on the parent's descriptors. gRPC reads these
# when it is imported, which this file does not do: if they are set later, one child in five crashes.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# By default gRPC writes strangers' goodbyes to stderr: GOAWAY's text, including line breaks.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_process: int | None = None
"""Id of the process that uses gRPC."""

_kept: Final[list[Any]] = []
"""In a child: objects that must not be freed."""


def begin() -> None:
    """Record that this process uses gRPC. ``ForkedProcessError`` if it was forked from one that does."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise ForkedProcessError(
            f"gRPC cannot be used here: this process was forked from process {_process}, which uses it. "
            "Start it by another method than fork (multiprocessing's 'spawn'), or fork before init_rpc"
        )


def abandon(what: Any, *, local: int | None = None, remote: Collection[Place] = ()) -> None:
    """In a forked child: never free ``what``, and close the descriptors of the connections from the port
    ``local``, and of those to ``remote``.
    """
    _kept.append(what)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # it is no socket, or not connected
            _close_if_of(int(name), local, remote)


def _close_if_of(descriptor: int, local: int | None, remote: Collection[Place]) -> None:
    sock = socket.socket(fileno=descriptor)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        if sock.getsockname()[1] != local and (not remote or place(sock.getpeername()) not in remote):
            return
    finally:
        sock.detach()
    os.close(descriptor)


def place(where: Any) -> Place:
    """Return the address and port of a socket's address; IPv4 in the form of IPv6 is converted."""
    return str(where[0]).removeprefix("::ffff:"), int(where[1])
