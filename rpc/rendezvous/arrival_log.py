"""The log of arrivals in the store, as every worker of a static group writes and reads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgpack

from rpc.group.workers import Member
from rpc.rendezvous.arrivals import Arrival
from rpc.rendezvous.store import SharedStore

__all__ = ["ArrivalLog"]

logger = logging.getLogger(__name__)


class ArrivalLog:
    """Arrivals that no group has used yet, and the groups that were formed.

    Args:
        store: under the job's prefix.
        hole_seconds: how long to wait for a record whose place in the log is taken; the process that
            took it may have died before it wrote. Should it still write, the record is found later.
    """

    def __init__(self, store: SharedStore, hole_seconds: float) -> None:
        self._store = store
        self._hole_seconds = hole_seconds
        self._next = store.counter("consumed") + 1
        self._holes: list[int] = []
        self._hole_since: float | None = None
        self._arrivals: dict[int, Arrival] = {}

    @property
    def position(self) -> int:
        """The last place in the log that was read."""
        return self._next - 1

    def append(self, arrival: Arrival) -> int:
        """Add an arrival at the end; returns its place."""
        index = self._store.add("arrivals", 1)
        self._store.set(f"arrival/{index}", arrival.pack())
        return index

    def has_passed(self, index: int) -> bool:
        """Whether a coordinator has read beyond a place, so that it is not read again."""
        return self._store.counter("consumed") >= index

    def read(self) -> list[Arrival]:
        """All arrivals so far that have no verdict, in order; one per incarnation."""
        self._holes = [index for index in self._holes if not self._take(index)]
        while True:
            if self._take(self._next):
                self._hole_since = None
            elif self._store.counter("arrivals") < self._next:
                break
            else:
                now = time.monotonic()
                self._hole_since = self._hole_since or now
                if now - self._hole_since < self._hole_seconds:
                    break
                self._hole_since = None
                self._holes.append(self._next)
            self._next += 1
        return sorted(self._arrivals.values(), key=lambda arrival: arrival.index)

    def _take(self, index: int) -> bool:
        packed = self._store.get(f"arrival/{index}")
        if packed is None:
            return False
        try:
            arrival = Arrival.unpack(index, packed)
        except ValueError as error:
            logger.warning("passing over arrival %d in the rendezvous, of another version? %s", index, error)
            return True
        if not self.has_verdict(arrival):
            self._arrivals.setdefault(arrival.member.incarnation, arrival)
        return True

    def drop(self, arrivals: Sequence[Arrival]) -> None:
        """Forget arrivals of the dead."""
        for arrival in arrivals:
            self._arrivals.pop(arrival.member.incarnation, None)

    def has_verdict(self, arrival: Arrival) -> bool:
        """Whether a coordinator has decided about it."""
        return self._store.has(f"verdict/{arrival.member.incarnation}")

    def formed(self) -> tuple[Member, ...]:
        """The members of the group that was formed last; empty if none was."""
        generation = self._store.get("last")
        return self.members(generation.decode()) if generation else ()

    def members(self, generation: str) -> tuple[Member, ...]:
        """The members of a group, by rank."""
        packed = self._store.get(f"group/{generation}")
        return tuple(map(Member.from_wire, msgpack.unpackb(packed))) if packed else ()
