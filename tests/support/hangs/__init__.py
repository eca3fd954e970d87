"""Programs that hang, each in its own way, and where ``farcall why`` must say that the reason is.

Each hang runs on all workers of a group. The line that is to be named ends in the comment ``culprit:`` with
the name of the hang.
"""

from tests.support.hangs import (  # each adds its hangs to ``HANGS``
    asynchronous,
    callees,
    cycles,
    group_operations,
    interpreters,
    links,
    processes,
    queues,
)
from tests.support.hangs.hang import HANGS, Hang

__all__ = [
    "HANGS",
    "Hang",
    "asynchronous",
    "callees",
    "cycles",
    "group_operations",
    "interpreters",
    "links",
    "processes",
    "queues",
]
