"""The log of arrivals of one job, in its store.

A counter gives an arrival its place, then one key holds the record, and another its verdict. Places are never
used again, even if the counter is deleted, so that no leftover of an earlier group or attempt can be mistaken
for an answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Final

import msgpack

from rpc.errors import RendezvousError
from rpc.group.workers import Member
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Entry, Verdict
from rpc.rendezvous.store import SharedStore
from rpc.runtime.legible import legible
from rpc.transport.authentication import ForeignRecordError

__all__ = ["Log", "OwnRecord"]

logger = logging.getLogger(__name__)

_MOST_ARRIVALS: Final = 1 << 16
"""Maximum number of arrivals since the log was trimmed: all are read, and strangers can set the counter."""


class OwnRecord(Enum):
    """The state of a worker's own place in the log."""

    INTACT = "its arrival, and a verdict of a worker of this job"
    NO_VERDICT = "its arrival; the verdict was deleted or overwritten by another program"
    NO_ARRIVAL = "nothing of this job: the arrival was deleted or overwritten by another program"
    TAKEN = "another arrival of this job"


class Log:
    """The log of arrivals of one job, and the static groups made of them. ``store`` is under its prefix."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._next = 1
        self._unread: tuple[int, ...] = ()  # before ``_next``
        self._passed_over = 0
        with contextlib.suppress(ForeignRecordError):
            unsettled = store.get("unsettled")
            if unsettled is not None:
                self._next, self._unread = _unpack_unsettled(unsettled)
        self._open: dict[int, Entry] = {}
        self.end = 0  # position after the last place, when it was read

    def append(self, arrival: Arrival) -> int:
        """Add an arrival at the end; returns its place."""
        packed = arrival.pack()
        while True:
            index = self._store.add("arrivals", 1)
            with contextlib.suppress(ForeignRecordError):
                if self._store.swap(f"arrival/{index}", b"", packed) == packed:
                    return index
            logger.warning(
                "place %d in the log of arrivals at %s is taken: was its counter deleted or reset?",
                index,
                self._store.description,
            )

    def read(self) -> list[Entry]:
        """Return all entries that are not settled, in order. Only new ones are read, and those whose arrival
        was not written before.
        """
        end = self.end = self._store.counter("arrivals") + 1
        unwritten = [entry.index for entry in self._open.values() if entry.arrival is None]
        for index in (*unwritten, *self._unread, *self._new(end)):
            self.entry(index)
        self._unread, self._next = (), max(self._next, end)
        return self.entries()

    def entries(self) -> list[Entry]:
        """Return the entries that were read and were not settled then, in order."""
        return [self._open[index] for index in sorted(self._open)]

    def before(self, place: int) -> Iterator[Entry]:
        """Like ``read``, up to a place; each entry is read when it is yielded."""
        for index in (*self._unread, *self._new(place)):
            entry = self.entry(index)
            if not entry.settled:
                yield entry
        self._unread, self._next = (), place

    def _new(self, end: int) -> range:
        """Return the places to read up to one that another process has given."""
        if end - self._next > _MOST_ARRIVALS:
            came = f"{end - self._next} workers have come since it was last looked through"
            raise RendezvousError(self._store.spoilt(came))
        return range(self._next, end)

    def entry(self, index: int) -> Entry:
        """Return the current entry at a place."""
        known = self._open.pop(index, None)
        entry = Entry(index, known.arrival if known else None, self.verdict(index))
        if entry.settled:
            self._passed_over += 1
            return entry
        if entry.arrival is None:
            try:
                packed = self._store.get(f"arrival/{index}")
                if packed is not None:
                    entry = replace(entry, arrival=Arrival.unpack(index, packed))
            except ForeignRecordError as error:
                entry = replace(entry, foreign=Arrival.claimed(index, error.claimed))
            except ValueError as error:
                logger.warning("passing over an arrival, of another version of farcall? %s", legible(error))
                return replace(entry, verdict=self.decide(index, Verdict(ArrivalKind.GONE)))
        self._open[index] = entry
        return entry

    def verdict(self, index: int) -> Verdict | None:
        """Return the verdict on an arrival, if it has one."""
        try:
            packed = self._store.get(f"arrival/{index}/verdict")
        except ForeignRecordError as error:
            return Verdict.claimed(error.claimed)
        return None if packed is None else Verdict.unpack(packed)

    def own(self, index: int, incarnation: int) -> tuple[OwnRecord, Verdict | None]:
        """Return what a worker finds at its own place, with the verdict if that is intact."""
        try:
            packed = self._store.get(f"arrival/{index}")
            if packed is None:
                return OwnRecord.NO_ARRIVAL, None
            if Arrival.unpack(index, packed).member.incarnation != incarnation:
                return OwnRecord.TAKEN, None
        except ValueError:  # includes foreign records
            return OwnRecord.NO_ARRIVAL, None
        try:
            packed = self._store.get(f"arrival/{index}/verdict")
            verdict = None if packed is None else Verdict.unpack(packed)
        except ValueError:
            verdict = None
        return OwnRecord.NO_VERDICT if verdict is None else OwnRecord.INTACT, verdict

    def is_out(self, index: int, incarnation: int) -> bool:
        """Whether the worker that arrived at a place was removed by one of the job's workers."""
        _, verdict = self.own(index, incarnation)
        return verdict is not None and verdict.kind is ArrivalKind.GONE

    def count_up_to(self, index: int) -> None:
        """Correct the counter, if it was deleted or set back to before a place."""
        missing = index - self._store.counter("arrivals")
        if missing > 0:
            self._store.add("arrivals", missing)

    def decide(self, index: int, verdict: Verdict) -> Verdict:
        """Write an arrival's verdict; returns the one that it has, which another worker may have written."""
        try:
            found = Verdict.unpack(self._store.swap(f"arrival/{index}/verdict", b"", verdict.pack()))
        except ForeignRecordError as error:
            found = Verdict.claimed(error.claimed)
        if not Entry(index, None, found).is_present:
            self._close(index)
        return found

    def swap(self, index: int, expected: Verdict, desired: Verdict) -> Verdict | None:
        """Replace a verdict, if it is still the expected one; returns the resulting one."""
        try:
            packed = self._store.swap(f"arrival/{index}/verdict", expected.pack(), desired.pack())
            found = Verdict.unpack(packed) if packed else None
        except ForeignRecordError as error:
            found = Verdict.claimed(error.claimed)
        if found is not None and found.kind is ArrivalKind.GONE:
            self._close(index)
        return found

    def remove(self, index: int) -> None:
        """Record that a member of a dynamic group is gone."""
        self._store.set(f"arrival/{index}/verdict", Verdict(ArrivalKind.GONE).pack())
        self._close(index)

    def _close(self, index: int) -> None:
        if self._open.pop(index, None) is not None:
            self._passed_over += 1

    def places(self, incarnation: int) -> list[int]:
        """Return the places at which a worker has arrived, among the entries that were read."""
        return [
            entry.index
            for entry in self._open.values()
            if entry.arrival is not None and entry.arrival.member.incarnation == incarnation
        ]

    def trim(self) -> None:
        """Make later readers skip the settled entries that this one has read. (If two trim at once, the last
        one counts, which at worst costs readers time: what is settled stays settled.)
        """
        if self._passed_over and not self._unread:
            self._passed_over = 0
            self._store.set("unsettled", msgpack.packb([self._next, sorted(self._open)]))

    def form(self, incarnation: int, members: tuple[Member, ...]) -> str:
        """Publish a static group; returns its key."""
        key = f"{self._store.add('generation', 1)}-{incarnation:x}"
        self._store.set(f"group/{key}", msgpack.packb([member.to_wire() for member in members]))
        self._store.set("last", key.encode())
        return key

    def members(self, key: str) -> tuple[Member, ...]:
        """Return the members of a static group, by rank."""
        packed = self._store.get(f"group/{key}")
        return tuple(map(Member.from_wire, msgpack.unpackb(packed))) if packed else ()

    def last_group(self) -> tuple[Member, ...]:
        """Return the members of the latest static group with this token; empty if there is none."""
        try:
            key = self._store.get("last")
            return self.members(key.decode()) if key else ()
        except ForeignRecordError:
            return ()


def _unpack_unsettled(packed: bytes) -> tuple[int, tuple[int, ...]]:
    """Decode the first place to read, and the places before it that are not settled."""
    following, unsettled = msgpack.unpackb(packed)
    return int(following), tuple(map(int, unsettled))
