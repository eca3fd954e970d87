"""Room for the files that connections need: a large group must not end at a limit that nobody chose.

Systems mostly let a process open 1024 files unless it asks for more, which a program may not want in
general: ``select`` knows no larger numbers. So the limit is raised with the number of peers, when it would be
too low for them, and as far as the system permits.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
from typing import Final

logger = logging.getLogger(__name__)

_FOR_A_PEER: Final = 6
"""Its connection, what threads need to read it, and a socket for shared memory, with some on their way."""
_FOR_ALL_ELSE: Final = 64


def provide_for(peers: int) -> None:
    """Let this process open as many files as it needs with so many peers.

    To be called for each new peer, from any thread; warns if the system does not permit enough. Of two calls
    at once, one may find the limit raised by the other, which does no harm.
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
    """How many files are open; 0 if the system does not tell. Those of earlier peers count twice then."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


@functools.cache
def _warn(limit: int) -> None:
    """Say once that a limit may be too low."""
    logger.warning(
        "this process may open no more than %d files, and may need more with so many other workers: "
        "raise the limit (ulimit -Hn)",
        limit,
    )
