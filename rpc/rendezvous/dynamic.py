"""Dynamic groups: workers join and leave at any time.

A joiner appends its entry to the roster, reads what is before it, and then decides its own entry: it becomes
a member, unless a living member has its name or rank. Since each waits until all earlier entries are
decided, of two that join at once the later knows the earlier, and it is the later that connects and
announces itself. A member found dead under the joiner's name or rank is replaced.

An entry that stays undecided, because its process died or stopped on the way, is decided by whoever has to
wait for it: it is gone. Should its process be only slow, it finds that out and appends itself again.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.group import Group
from rpc.rendezvous.liveness import Probe, probe
from rpc.rendezvous.mode import enter_dynamic, is_dynamic
from rpc.rendezvous.roster import GONE, Entry, Roster
from rpc.rendezvous.store import SharedStore, StoreLost
from rpc.rendezvous.waiting import Abandoned, Backoff, OutOfTime, Waiting, run_with_deadline

__all__ = ["DynamicGroup", "join_dynamic"]

_UNWRITTEN_SECONDS = 1.0
_UNDECIDED_SECONDS = 5.0
_LEAVE_SECONDS = 2.0


@dataclass(frozen=True)
class DynamicGroup(Group):
    """A dynamic group as it was when this worker joined. ``members`` are those that joined before, and me."""

    store: SharedStore
    place: int

    def leave(self, timeout: float = _LEAVE_SECONDS) -> bool:
        """Strike this worker off the roster, so that later joiners do not look for it.

        Args:
            timeout: how long to try, in seconds.

        Returns:
            Whether that worked; it does not if the store is gone, and does no harm then.
        """
        try:
            run_with_deadline(lambda waiting: Roster(self.store).remove(self.place), timeout, "the store")
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
) -> DynamicGroup:
    """Join a dynamic group, or found it.

    Args:
        store: where its workers meet. It must outlive this worker if others are to join later.
        me: this worker; it listens on its addresses already. With id -1 it gets the smallest free one.
        timeout: seconds to wait for the store and for others that are joining.
        job: keeps jobs apart that share a store.
        tell: tells whether a member lives.

    Raises:
        GroupMismatchError: a living member has this worker's name or rank, or a static group lives in this
            store.
        RendezvousTimeoutError: the store, or a worker that is joining, did not answer in time.
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"

    def work(waiting: Waiting) -> DynamicGroup:
        try:
            return store.outlast(
                waiting, lambda: _join(store.under(f"farcall/{job}"), me, process, waiting, job, tell)
            )
        except OutOfTime:
            raise RendezvousTimeoutError(
                f"'{me.name}' ({process}) waited {timeout:g} s at {store.description} to join its dynamic "
                f"group: a worker that is joining too does not finish."
            ) from None

    return run_with_deadline(work, timeout, store.description)


def _join(
    store: SharedStore, me: Member, process: str, waiting: Waiting, job: str, tell: Probe
) -> DynamicGroup:
    roster = Roster(store)
    while True:
        name = enter_dynamic(store, tell)
        place = roster.append(me, process)
        try:
            if not is_dynamic(store):  # a static group was formed between these two steps
                roster.decide(place, GONE)
                continue
            earlier = [_decided(roster, entry, waiting, tell) for entry in roster.before(place)]
            members = _members(roster, me, process, earlier, tell)
            taken = {member.id for member in members}
            own_id = me.id if me.id >= 0 else min(set(range(len(taken) + 1)) - taken)
            if roster.decide(place, str(own_id).encode()) == GONE:
                continue  # taken for dead: try again
        except (GroupMismatchError, OutOfTime, Abandoned):
            roster.decide(place, GONE)
            raise
        me = replace(me, info=WorkerInfo(me.name, own_id))
        group = tuple(sorted([*members, me], key=lambda member: member.id))
        return DynamicGroup(me, group, f"{job}/{name}", False, store, place)


def _decided(roster: Roster, entry: Entry, waiting: Waiting, tell: Probe) -> Entry:
    """Wait until an entry is decided; decide it, if its process does not."""
    backoff = Backoff(waiting, 0.05)
    since = time.monotonic()
    while not entry.state:
        waited = time.monotonic() - since
        dead = entry.member is not None and tell(entry.member) is False
        patience = _UNWRITTEN_SECONDS if entry.member is None else _UNDECIDED_SECONDS
        if dead or waited > patience:
            roster.decide(entry.index, GONE)
        else:
            backoff.pause()
        entry = roster.entry(entry.index)
    return entry


def _members(roster: Roster, me: Member, process: str, earlier: list[Entry], tell: Probe) -> list[Member]:
    """The members among the earlier entries. A dead one in our place is removed; a living one raises."""
    members: list[Member] = []
    for entry in earlier:
        member = entry.member
        if not entry.is_member or member is None:
            continue
        same_name = member.name == me.name
        if same_name or member.id == me.id:
            if tell(member) is not False:
                what = f"name '{me.name}'" if same_name else f"rank {me.id}"
                raise GroupMismatchError(
                    f"'{me.name}' ({process}) cannot join: the {what} is not unique, the living worker "
                    f"'{member.name}' (id {member.id}, {entry.process}) has it. Choose another, or stop "
                    f"that one."
                )
            roster.remove(entry.index)
            continue
        members.append(member)
    return members
