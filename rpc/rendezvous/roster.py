"""The roster of a dynamic group in the store: who has joined, in order, and who is gone.

A joiner appends its entry (a counter gives the place, a key holds the record). The entry then gets a state,
once and by compare-and-set: an id, which makes it a member, or *gone*. Whoever comes later needs the states
of all earlier entries, and may itself decide that one whose process died in between is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgpack

from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.liveness import Probe
from rpc.rendezvous.store import SharedStore

__all__ = ["GONE", "Entry", "Roster"]

GONE = b"gone"


@dataclass(frozen=True, slots=True)
class Entry:
    """A place in the roster.

    Attributes:
        member: who took it; ``None`` if the record is not there (yet). Its id counts once it is a member.
        state: empty while undecided, ``GONE``, or the id in decimal.
    """

    index: int
    member: Member | None
    state: bytes
    process: str = ""

    @property
    def is_gone(self) -> bool:
        """Whether it left, was replaced or never became a member."""
        return self.state == GONE

    @property
    def is_member(self) -> bool:
        """Whether it is decided and not gone."""
        return bool(self.state) and not self.is_gone


class Roster:
    """Reads and writes the roster. Args: the store, under the job's prefix."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    def append(self, member: Member, process: str) -> int:
        """Append an undecided entry; returns its place, from 1."""
        index = self._store.add("roster", 1)
        self._store.set(f"roster/{index}", msgpack.packb([member.to_wire(), process]))
        return index

    def entry(self, index: int) -> Entry:
        """What there is at a place."""
        state = self._store.get(f"roster/{index}/state") or b""
        packed = None if state == GONE else self._store.get(f"roster/{index}")
        if packed is None:
            return Entry(index, None, state)
        fields, process = msgpack.unpackb(packed)
        member = Member.from_wire(fields)
        if state:
            member = replace(member, info=WorkerInfo(member.name, int(state)))
        return Entry(index, member, state, process)

    def decide(self, index: int, state: bytes) -> bytes:
        """Give an undecided entry its state; returns the one it has, which may be another's decision."""
        return self._store.swap(f"roster/{index}/state", b"", state)

    def remove(self, index: int) -> None:
        """The member of this entry is gone."""
        self._store.set(f"roster/{index}/state", GONE)

    def before(self, index: int) -> Iterator[Entry]:
        """The entries before a place that are not gone; drops a prefix of gone ones for later readers."""
        first = known_first = self._store.counter("roster/first") or 1
        for earlier in range(first, index):
            entry = self.entry(earlier)
            if entry.is_gone and earlier == first:
                first += 1
            if not entry.is_gone:
                yield entry
        if first > known_first:
            self._store.set("roster/first", str(first).encode())

    def any_alive(self, tell: Probe) -> bool:
        """Whether a member, or somebody about to become one, lives."""
        end = self._store.counter("roster") + 1
        return any(entry.member is not None and tell(entry.member) is not False for entry in self.before(end))
