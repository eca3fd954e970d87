"""What the workers of a group are connected by, which decides how large messages travel.

The seed of a program decides between them, so each goes over one, and over the same one each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any


class Link(Enum):
    """How messages travel."""

    SHARED_MEMORY = "shared memory"
    UNIX = "Unix sockets"
    TCP = "TCP"
    STRIPES = "TCP, over several connections"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a group's workers, of ``rpc.options.AgentOptions``."""
        match self:
            case Link.SHARED_MEMORY:
                return {}
            case Link.UNIX:
                return {"transports": ["unix"], "shared_memory_bytes": 0}
            case Link.TCP:
                return {"transports": ["tcp"], "shared_memory_bytes": 0}
            case Link.STRIPES:
                return {"transports": ["tcp"], "shared_memory_bytes": 0, "tcp_stripes": 3}


def link_of(seed: int) -> Link:
    """What the program of a seed goes over."""
    return list(Link)[seed % len(Link)]


def by_link(seeds: Iterable[int]) -> Iterator[tuple[Link, list[int]]]:
    """The seeds of the programs that one group can run; without those links that none of them goes over."""
    ordered = sorted(seeds, key=lambda seed: list(Link).index(link_of(seed)))
    for link, some in itertools.groupby(ordered, link_of):
        yield link, list(some)
