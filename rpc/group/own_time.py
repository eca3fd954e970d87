"""Whether time has passed for this worker, and whether another one of this host has had a chance to answer.

Limits of time are meant for workers that could have acted. On a machine with many more busy processes than
cores, a process may get a core for a hundredth of the time: an answer has arrived long ago when the process
comes to read it, and the other side may be waiting for a core as well. So limits are measured on a clock that
stands still while this process is ready to run and waits for a core; and before a worker of this host is
given up, the kernel is asked whether its process computes, or waits for a core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from rpc.group.peer import Peer
from rpc.runtime.listening_processes import listening_processes
from rpc.runtime.process_signs import ProcessSigns, process_signs

__all__ = ["LEAST_SECONDS", "Neighbours", "OwnTime"]

LEAST_SECONDS: Final = 0.05
"""Time in seconds for which the wait for a limit is worth continuing."""

_SEARCH_SECONDS: Final = 30.0
"""Minimum interval in seconds between two searches for the processes of this host."""


class OwnTime:
    """A clock, in seconds, that stands still while this process waits for a core.

    Args:
        now: the monotonic clock.
        waited: returns for how long the calling thread has waited for a core since it started.

    Example::

        own_time = OwnTime(loop.time, waited_for_core)
        began = own_time()
    """

    def __init__(self, now: Callable[[], float], waited: Callable[[], float] = float) -> None:
        self._now = now
        self._waited = waited
        self._longest = 0.0

    def __call__(self) -> float:
        """Return the time. Always on the same thread."""
        self._longest = max(self._longest, self._waited())  # it may be unknown for once
        return self._now() - self._longest


class Neighbours:
    """The processes of the workers on this host. On the loop's thread.

    Args:
        search: returns the process that listens on each port of this host.
        look: returns the state of a process.
    """

    def __init__(
        self,
        search: Callable[[], Mapping[int, int]] = listening_processes,
        look: Callable[[int], ProcessSigns | None] = process_signs,
    ) -> None:
        self._search = search
        self._look = look
        self._found: Mapping[int, int] = {}
        self._searched = -_SEARCH_SECONDS

    def find(self, peer: Peer) -> None:
        """Find the process of a worker that is reached by TCP; a Unix socket tells it. All descriptors of all
        processes are looked at, once for all workers.
        """
        if peer.link.process is not None or not peer.near or peer.is_self:
            return
        port = next((_port(each) for each in peer.member.addresses if each.startswith("tcp:")), None)
        if port is None:
            return
        if port not in self._found and monotonic() - self._searched >= _SEARCH_SECONDS:
            self._searched = monotonic()
            self._found = self._search()
        peer.link.process = self._found.get(port)

    def signs(self, peer: Peer) -> ProcessSigns | None:
        """Return the state of a worker's process; None if it has ended, or is not known."""
        return self._look(peer.link.process) if peer.link.process else None


def _port(address: str) -> int | None:
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else None
