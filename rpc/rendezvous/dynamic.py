"""Dynamic groups: workers join and leave at any time.

A joiner appends its arrival to the log, reads what is before it, and then decides about itself: it becomes a
member, unless a living member has its name or rank. Since each waits until all earlier arrivals are
decided, of two that join at once the later knows the earlier, and it is the later that connects and
announces itself. A member found dead under the joiner's name or rank is replaced.

An arrival that stays undecided, because its process died or stopped on the way, is decided by whoever has to
wait for it: it is gone. Should its process be only slow, it finds that out and appends itself again.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.address import Probe, dead_among, probe
from rpc.rendezvous.arrivals import DEFAULT_PACE, Arrival, Entry, Group, Kind, Pace, Verdict, mixed
from rpc.rendezvous.store import (
    Abandoned,
    Backoff,
    Log,
    OutOfTime,
    SharedStore,
    StoreLost,
    Waiting,
    run_with_deadline,
)

__all__ = ["DynamicGroup", "join_dynamic"]

_GONE = Verdict(Kind.GONE)


@dataclass(frozen=True)
class DynamicGroup(Group):
    """A dynamic group as it was when this worker joined. ``members`` are those that joined before, and me.

    Attributes:
        store: where it met, under the job's prefix.
        place: this worker's in the log.
    """

    store: SharedStore
    place: int

    def leave(self, timeout: float = 2.0) -> bool:
        """Have later joiners not look for this worker.

        Args:
            timeout: how long to try, in seconds.

        Returns:
            Whether that worked; it does not if the store is gone, and does no harm then.
        """
        try:
            run_with_deadline(lambda _: Log(self.store).remove(self.place), timeout, "the store")
        except (RendezvousError, StoreLost):
            return False
        return True


def join_dynamic(
    store: SharedStore,
    me: Member,
    timeout: float,
    *,
    job: str = "default",
    tell: Probe = probe,
    pace: Pace = DEFAULT_PACE,
) -> DynamicGroup:
    """Join a dynamic group, or found it.

    Args:
        store: where its workers meet. It must outlive this worker if others are to join later.
        me: this worker; it listens on its addresses already. With id -1 it gets the smallest free one.
        timeout: seconds to wait for the store and for others that are joining.
        job: keeps jobs apart that share a store.
        tell: tells whether a member lives.
        pace: how patient to be.

    Raises:
        GroupMismatchError: a living member has this worker's name or rank, or a static group lives in this
            store.
        RendezvousTimeoutError: the store, or a worker that is joining, did not answer in time.
    """

    def join(waiting: Waiting) -> DynamicGroup:
        joining = _Joining(store.under(f"farcall/{job}"), Arrival.of(me, 0), waiting, tell, pace)
        while (group := joining.attempt(job)) is None:
            pass
        return group

    return run_with_deadline(
        lambda waiting: store.outlast(waiting, lambda: join(waiting)), timeout, store.description
    )


class _Joining:
    """One worker's way into the group. Lives on the helper thread."""

    def __init__(self, store: SharedStore, me: Arrival, waiting: Waiting, tell: Probe, pace: Pace) -> None:
        self._store = store
        self._arrival = me
        self._me = me.member
        self._waiting = waiting
        self._tell = tell
        self._pace = pace

    def attempt(self, job: str) -> DynamicGroup | None:
        """Join once; None if this worker was so slow that others have taken it for dead."""
        log = Log(self._store)
        place = log.append(self._arrival)
        try:
            members = self._members_before(log, place)
        except (RendezvousError, OutOfTime, Abandoned):
            log.decide(place, _GONE)
            raise
        taken = {member.id for member in members}
        own_id = self._me.id if self._me.id >= 0 else min(set(range(len(taken) + 1)) - taken)
        if log.decide(place, Verdict(Kind.MEMBER, str(own_id))) == _GONE:
            return None
        log.trim()
        me = replace(self._me, info=WorkerInfo(self._me.name, own_id))
        group = tuple(sorted([*members, me], key=lambda member: member.id))
        name = self._store.swap("dynamic", b"", secrets.token_hex(8).encode()).decode()
        return DynamicGroup(me, group, f"{job}/dynamic-{name}", False, self._store, place)

    def _members_before(self, log: Log, place: int) -> list[Member]:
        """The members that arrived before. A dead one in our place is removed; a living one raises."""
        members: list[Member] = []
        for entry in log.read():
            if entry.index >= place:
                break
            member = self._decided(log, entry).member()
            if member is None:
                continue
            if member.incarnation == self._me.incarnation:  # an attempt of ours that the store was lost in
                log.remove(entry.index)
            elif member.name == self._me.name or member.id == self._me.id:
                if self._tell(member) is not False:
                    what = f"name '{member.name}'" if member.name == self._me.name else f"rank {member.id}"
                    process = entry.arrival.process if entry.arrival else ""
                    raise GroupMismatchError(
                        f"{self._arrival} cannot join: the {what} is not unique, the living worker "
                        f"'{member.name}' (id {member.id}, {process}) has it. Choose another, or stop "
                        f"that one."
                    )
                log.remove(entry.index)
            else:
                members.append(member)
        static = log.last_group()
        dead = dead_among(static, self._tell)
        alive = [member.name for member in static if member.incarnation not in dead]
        if alive:
            raise GroupMismatchError(mixed("a static group", alive))
        return members

    def _decided(self, log: Log, entry: Entry) -> Entry:
        """Wait until an arrival has a verdict; give it one, if its process does not."""
        backoff = Backoff(self._waiting, 0.05)
        began = time.monotonic()
        while (entry := log.entry(entry.index)).verdict is None:
            arrival = entry.arrival
            patience = self._pace.unwritten if arrival is None else self._pace.undecided
            if arrival is not None and self._tell(arrival.member) is False:
                patience = 0.0
            elif arrival is not None and arrival.world_size:
                raise GroupMismatchError(mixed("a static group", [arrival.member.name]))
            if time.monotonic() - began >= patience:
                log.decide(entry.index, _GONE)
                continue
            try:
                backoff.pause()
            except OutOfTime:
                raise RendezvousTimeoutError(
                    f"{self._arrival} waited {self._waiting.timeout:g} s at {self._store.description} to "
                    f"join its dynamic group: {arrival or 'a worker'} is joining too and does not finish."
                ) from None
        return entry
