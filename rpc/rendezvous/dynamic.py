"""Dynamic groups: workers join and leave at any time.

All workers that meet in one store for one job are one group, so its key is the job's name: no worker can
found a second group beside it, whatever has happened to the store. ``keeping`` has what members do for later
joiners.

A joiner appends its arrival to the log, reads the entries before it, and then decides about itself: it is
announced, unless a living member has its name or rank. Since each waits until all earlier arrivals are
decided, of two that join at the same time the later knows the earlier, and connects to it. It becomes a
member when that has succeeded (``watching``), or at once if there is no other worker. A member found dead
under the joiner's name or rank is replaced.

An arrival that stays undecided, because its process died or stopped, is decided by the first worker that has
to wait for it: it is gone. If its process is only slow, it finds that out and appends itself again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.address import Probe, probe
from rpc.rendezvous.arrivals import (
    DEFAULT_PACE,
    Arrival,
    ArrivalKind,
    Entry,
    Group,
    Pace,
    Verdict,
    foreign,
    mixed,
)
from rpc.rendezvous.log import Log
from rpc.rendezvous.parting import Part
from rpc.rendezvous.store import Abandoned, Backoff, SharedStore, StoreWait

_GONE = Verdict(ArrivalKind.GONE)


@dataclass(frozen=True)
class DynamicGroup(Group):
    """A dynamic group as it was when this worker joined. ``members`` are those that joined before, and me."""

    store: SharedStore  # under the job's prefix
    place: int  # this worker's place in the log
    established: frozenset[int]  # incarnations of those that were members then, and not only announced


def join_dynamic(
    store: SharedStore,
    me: Member,
    timeout: float,
    *,
    job: str = "default",
    tell: Probe = probe,
    pace: Pace = DEFAULT_PACE,
) -> DynamicGroup:
    """Be announced in a dynamic group, or found it; arguments as for ``join_static``. With id -1, ``me`` gets
    the smallest free one.

    Raises:
        GroupMismatchError: a living member has this worker's name or rank, or a static group lives in this
            store.
        RendezvousTimeoutError: the store, or a worker that is joining, did not answer in time.
    """

    def join(waiting: StoreWait) -> DynamicGroup:
        joining = Joining(store.under(f"farcall/{job}"), Arrival.of(me, 0), waiting, tell, pace)
        while (group := joining.attempt(job)) is None:
            pass
        return group

    return store.run(join, timeout)


@dataclass(frozen=True)
class Joining:
    """One worker's attempt to join the group, or to return to its log. Used on the helper thread."""

    store: SharedStore
    arrival: Arrival
    waiting: StoreWait
    tell: Probe
    pace: Pace

    def attempt(self, job: str) -> DynamicGroup | None:
        """Join once; returns None if this worker was so slow that others considered it dead."""
        log = Log(self.store)
        place = log.append(self.arrival)
        try:
            entries = self._members_before(log, place)
        except (RendezvousError, Abandoned):
            log.decide(place, _GONE)
            raise
        me, members = self.arrival.member, [member for member, _ in entries]
        taken = {member.id for member in members}
        own_id = me.id if me.id >= 0 else min(set(range(len(taken) + 1)) - taken)
        kind = ArrivalKind.ANNOUNCED if members else ArrivalKind.MEMBER
        own = Verdict(kind, str(own_id))
        given = log.decide(place, own)
        if given.is_present and given != own:  # another worker's arrival there was deleted
            log.remove(place)
            return None
        if given == _GONE:
            return None
        given.raise_if_refused()
        log.trim()
        me = replace(me, info=WorkerInfo(me.name, own_id))
        group = tuple(sorted([*members, me], key=lambda member: member.id))
        established = frozenset(member.incarnation for member, is_member in entries if is_member)
        return DynamicGroup(me, group, f"{job}/dynamic", False, self.store, place, established)

    def come_back(
        self, log: Log, roster: Iterable[Member], kind: ArrivalKind = ArrivalKind.MEMBER
    ) -> list[Member]:
        """Add members of the group to a log in which they are missing, after the store was lost; this worker
        is one of them. Returns all members in it; of any two members that do this, the later one finds the
        other.

        Raises:
            GroupMismatchError: a static group has come to meet there, or workers with another token have.
        """
        known = {member.incarnation for member in self._members(log)}
        for member in roster:
            if member.incarnation not in known:
                told = f"as '{self.arrival.member.name}' has told, {self.arrival.process}"
                index = log.append(Arrival(0, member, 0, told))
                log.decide(index, Verdict(kind, str(member.id)))
        return self._members(log)

    def _members(self, log: Log) -> list[Member]:
        """Return all workers that are in the log now, each once."""
        found: dict[int, Member] = {}
        for entry in log.read():
            if entry.foreign is not None and self.tell(entry.foreign.member) is not False:
                raise GroupMismatchError(foreign(entry.foreign))
            member = self._decided(log, entry).member()
            if member is not None:
                found[member.incarnation] = member
        self._check_alone(log)
        return list(found.values())

    def _check_alone(self, log: Log) -> None:
        alive = [member.name for member in log.last_group() if self.tell(member)]
        if alive:
            raise GroupMismatchError(mixed("a static group", alive))

    def _members_before(self, log: Log, place: int) -> list[tuple[Member, bool]]:
        """Return the workers that arrived before, and whether they are members. A dead one with this worker's
        name or rank is removed; a living one raises.
        """
        me = self.arrival.member
        members: dict[int, tuple[Member, bool]] = {}
        for arrived in log.before(place):
            if arrived.foreign is not None:
                if self.tell(arrived.foreign.member) is not False:
                    raise GroupMismatchError(foreign(arrived.foreign))
                continue
            if arrived.arrival is not None and arrived.arrival.member.incarnation == me.incarnation:
                log.remove(arrived.index)  # an attempt of this worker during which the store was lost
                continue
            entry = self._decided(log, arrived)
            member = entry.member()
            if member is None:
                continue
            if member.name == me.name or member.id == me.id:
                if self.tell(member) is not False or self._answers(log, entry, place):
                    what = f"name '{member.name}'" if member.name == me.name else f"rank {member.id}"
                    process = entry.arrival.process if entry.arrival else ""
                    raise GroupMismatchError(
                        f"{self.arrival} cannot join: the {what} is not unique, the living worker "
                        f"'{member.name}' (id {member.id}, {process}) has it. Choose another, or stop "
                        f"that one."
                    )
                log.remove(entry.index)
            else:
                members[member.incarnation] = member, entry.is_established
        self._check_alone(log)
        return list(members.values())

    def _answers(self, log: Log, entry: Entry, place: int) -> bool:
        """Whether a worker whose address refuses connections answers in the log: if it is on another host, a
        firewall may have refused them.
        """
        member, verdict = entry.member(), entry.verdict
        if member is None or verdict is None or member.host == self.arrival.member.host:
            return False
        asking = verdict.asking(Part(place, frozenset({self.arrival.member.incarnation})).question())
        found = log.swap(entry.index, verdict, asking)
        backoff, began = Backoff(self.waiting), time.monotonic()
        while found is not None and found.question and time.monotonic() - began < self.pace.answer:
            if not backoff.pause():
                return True
            found = log.verdict(entry.index)
        return found is not None and found.is_present and not found.question

    def _decided(self, log: Log, entry: Entry) -> Entry:
        """Wait until an arrival has a verdict; write one, if its process does not."""
        backoff = Backoff(self.waiting, 0.05)
        began = time.monotonic()
        while entry.verdict is None:
            arrival, patience = entry.arrival, self.pace.unwritten
            if arrival is not None:
                alive = self.tell(arrival.member)
                if alive and arrival.world_size:
                    raise GroupMismatchError(mixed("a static group", [arrival.member.name]))
                patience = 0.0 if alive is False else self.pace.undecided
            if time.monotonic() - began >= patience:
                log.decide(entry.index, _GONE)
            elif not backoff.pause():
                raise RendezvousTimeoutError(
                    f"{self.arrival} waited {self.waiting.timeout:g} s at {self.store.description} to "
                    f"join its dynamic group: {arrival or 'a worker'} is also joining, and has not finished."
                )
            entry = log.entry(entry.index)
        return entry
