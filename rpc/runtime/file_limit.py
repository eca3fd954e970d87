"""The limit of open files: a large group must not fail because of a default limit.

Most systems let a process open 1024 files unless it asks for more, which a program may not want in general:
``select`` knows no larger numbers. So the limit is raised with the number of peers, when it would be too low
for them, and as far as the system permits. If that is not enough for the connections themselves, a worker
does not join: it would hang or fail later, when others connect.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
from typing import Final

from rpc.errors import RpcError

logger = logging.getLogger(__name__)

_FOR_A_PEER: Final = 6
"""Number of files per peer: its connection, those needed to read it, a socket for shared memory, and a
reserve.
"""
_FOR_ALL_ELSE: Final = 64

_LEAST_FOR_A_PEER: Final = 4
_LEAST_FOR_ALL_ELSE: Final = 32
"""Number of other open files without which connections are not accepted."""


def check(peers: int) -> None:
    """Raise ``RpcError`` if the system does not let this process open as many files as a group with this
    number of other workers needs at least.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = _open_now()
    least = now + _LEAST_FOR_A_PEER * peers + _LEAST_FOR_ALL_ELSE
    if hard != resource.RLIM_INFINITY and hard < least:
        raise RpcError(
            f"a worker with {peers} others needs at least {least} open files, better "
            f"{now + _FOR_A_PEER * peers + _FOR_ALL_ELSE}, and this process may open no more than {hard} "
            f"({now} are open now): raise the limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of "
            f"docker)"
        )


def provide_for(peers: int) -> None:
    """Raise the limit of open files as needed for a number of peers.

    To be called for each new peer, from any thread; warns if the system does not permit enough. Of two
    concurrent calls, one may find the limit raised by the other, which does no harm.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open_now() + _FOR_A_PEER * peers + _FOR_ALL_ELSE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    enough = max(needed, 2 * soft)
    granted = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if granted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    if granted < needed:
        _warn(granted)


def _open_now() -> int:
    """Return the number of open files; 0 if it is unknown. Files of earlier peers then count twice."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


@functools.cache
def _warn(limit: int) -> None:
    """Warn once that a limit may be too low."""
    logger.warning(
        "this process may open no more than %d files, and may need more for this number of other workers: "
        "raise the limit (ulimit -Hn)",
        limit,
    )
