"""Static groups: a number of workers, known beforehand, that start together.

*Arriving.* Each worker appends its arrival to the log and waits only for a verdict on it.

*The coordinator* is the worker of rank 0 (if several claim that rank, the earliest that lives). It reads the
log until every rank has arrived, and then publishes the group and a verdict for each. Arrivals that cannot
form one group are all refused, by a verdict that says why. The coordinator stays until all have read their
verdict, since its process may serve the store.

*The dead.* An attempt that was killed leaves arrivals of dead processes. So before conflicting arrivals are
refused, and before arrivals older than the coordinator's own are accepted, their addresses are probed. Dead
workers' arrivals are gone. So is a place in the log that was taken and never written; if its process is only
slow, it finds that out and appends itself again.

*Latecomers.* A worker that arrives when its group is complete, because its rank or name was given twice,
finds no coordinator. If a living worker of the latest group has its name or rank, it gives up with an error.
So does a coordinator, for all that have arrived: they belong to another job, which happens to meet in the
same store.

*Dynamic groups* may use the same log, before and after: of living workers of both kinds the one that arrived
later gives up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rpc.group.workers import Member
from rpc.rendezvous.address import Probe, dead_among, probe
from rpc.rendezvous.arrivals import (
    DEFAULT_PACE,
    WHAT_TO_CHECK,
    Arrival,
    ArrivalKind,
    Conflict,
    Group,
    Pace,
    Verdict,
    describe_ranks,
    examine,
    foreign,
    mixed,
)
from rpc.rendezvous.log import Log
from rpc.rendezvous.store import Abandoned, Backoff, SharedStore, StoreWait
from rpc.runtime import waits
from rpc.runtime.notices import Notices

logger = logging.getLogger(__name__)


def join_static(
    store: SharedStore,
    me: Member,
    world_size: int,
    timeout: float,
    *,
    job: str = "default",
    tell: Probe = probe,
    pace: Pace = DEFAULT_PACE,
) -> Group:
    """Join a group of a known size; returns when all its workers have arrived.

    Args:
        store: store in which they meet.
        me: this worker; it listens on its addresses already.
        world_size: number of workers.
        timeout: timeout in seconds for all others to arrive.
        job: name that separates jobs that share a store.
        tell: returns whether a member lives.
        pace: timeouts and intervals.

    Raises:
        GroupMismatchError: a name or rank is taken twice, a rank is outside the group, world sizes differ, or
            a dynamic group lives in this store. All workers that have arrived get it.
        RendezvousTimeoutError: not all have arrived in time; the text names the missing ones.
        RendezvousError: rank 0 was interrupted, or the store failed.
    """

    def join(waiting: StoreWait) -> Group:
        joining = _Joining(store.under(f"farcall/{job}"), Arrival.of(me, world_size), waiting, tell, pace)
        verdict = joining.run()
        verdict.raise_if_refused()
        return Group(me, joining.log.members(verdict.detail), f"{job}/{verdict.detail}", static=True)

    return store.run(join, timeout)


class _Doubt(NamedTuple):
    """Why the arrivals may not form a group, and the time in seconds after which that is reported."""

    reason: str
    patience: float


class _Joining:
    """One worker's wait for its verdict. Used on the helper thread."""

    def __init__(
        self, store: SharedStore, arrival: Arrival, waiting: StoreWait, tell: Probe, pace: Pace
    ) -> None:
        self._store = store
        self._arrival = arrival
        self._me = arrival.member
        self._waiting = waiting
        self._tell = tell
        self._pace = pace
        self._looked_at = time.monotonic()
        waiters = 1 if self._me.id == 0 else arrival.world_size  # only the coordinator needs to be quick
        self._backoff = Backoff(waiting, min(0.5, max(0.02, waiters / 2000)))
        self._known = 0
        self._coordinates = False
        self._others: list[Arrival] = []
        self.log = Log(store)
        self._wait = waits.waiting(
            "rendezvous",
            place=store.description,
            world_size=arrival.world_size,
            name=self._me.name,
            rank=self._me.id,
        )
        self._index = self.log.append(arrival)

    def run(self) -> Verdict:
        """Return the verdict on this worker, after the workers that rely on it have read theirs."""
        try:
            verdict = self._give(self._find() or self._out_of_time())
        except Abandoned:
            self._give(
                Verdict(ArrivalKind.INTERRUPTED, f"the coordinator, {self._arrival}, was interrupted.")
            )
            raise
        self._store.set(f"arrival/{self._index}/read", b"1")
        self._await_readers({each.index: each.member for each in self._others})
        return verdict

    def _find(self) -> Verdict | None:
        """Wait until there is a verdict, or this worker can decide it; returns None at the deadline."""
        notices = Notices()
        with self._wait:
            return self._look_until_given(notices)

    def _look_until_given(self, notices: Notices) -> Verdict | None:
        doubt_since: float | None = None
        while (given := self.log.verdict(self._index)) is None or given.kind is ArrivalKind.GONE:
            if given is not None:  # this process was so slow to write its arrival that others gave it up
                self._index = self.log.append(self._arrival)
            match self._look():
                case Verdict() as verdict:
                    return verdict
                case _Doubt(reason, patience):
                    doubt_since = doubt_since or time.monotonic()
                    if time.monotonic() - doubt_since >= patience:
                        return Verdict(ArrivalKind.MISMATCH, reason)
                case None:
                    doubt_since = None
            if notices.due() and (strangers := self._tell_of_waiting(notices)) is not None:
                return strangers
            if not self._backoff.pause():
                return None
        # Another worker has decided, and those that it refused may have arrived again.
        self._coordinates = False
        return given

    def _tell_of_waiting(self, notices: Notices) -> Verdict | None:
        """Log which workers have arrived; or find those that will never be in this group."""
        world_size = self._arrival.world_size
        present = self._arrivals()
        missing = set(range(world_size)) - {each.member.id for each in present}
        if theirs := self._store.pytorch_ranks(missing):
            return Verdict(
                ArrivalKind.MISMATCH,
                f"{self._arrival} cannot form a group with rank {theirs[0]} at {self._store.description}: "
                f"torch.distributed.rpc runs there, and the two do not speak to each other. Run that program "
                f"with `farcall run`, or have it import farcall's rpc.",
            )
        text = (
            f"{self._arrival} has waited {notices.waited} at {self._store.description} for a group of "
            f"{world_size}. {describe_ranks([each.member.id for each in present], world_size)}"
        )
        if notices.told > 1:  # before that, the others are probably still importing PyTorch
            text += f" {WHAT_TO_CHECK}"
            if 0 in missing and self._store.master is not None and self._me.id != 0:
                text += (
                    " The store is served: by a rank 0 that is just starting, by another job or by PyTorch."
                )
            text += f" It gives up in {self._waiting.remaining:.0f} s."
        logger.warning("%s", text)
        return None

    def _look(self) -> Verdict | _Doubt | None:
        """Return what this worker can decide: as coordinator, or because another has its name or rank."""
        due = time.monotonic() - self._looked_at >= self._pace.latecomer
        if due:
            self._looked_at = time.monotonic()
        if not due and self._me.id != 0:
            return None
        arrivals = self._arrivals()
        self._wait.details["present"] = sorted({each.member.id for each in arrivals})
        if len(arrivals) != self._known:
            self._known = len(arrivals)
            self._backoff.restart()
        coordinator = next((each for each in arrivals if each.member.id == 0 and self._may_wait(each)), None)
        self._coordinates = coordinator is not None and coordinator.member.incarnation == self._me.incarnation
        found = self._judge(arrivals) if self._coordinates else None
        if found is None and due and (self._coordinates or coordinator is None):
            taken = self._who_has_our_place()
            found = None if taken is None else _Doubt(taken, 0.0)
        return found

    def _foreign(self) -> list[Arrival]:
        """Return the arrivals without a verdict that have another token."""
        found = [entry.foreign for entry in self.log.read() if entry.verdict is None]
        return [arrival for arrival in found if arrival is not None]

    def _arrivals(self) -> list[Arrival]:
        """Return the arrivals for a static group that had no verdict when they were read."""
        found = [entry.arrival for entry in self.log.read()]
        return [arrival for arrival in found if arrival is not None and arrival.world_size]

    def _may_wait(self, other: Arrival) -> bool:
        """Whether another worker may still live and wait for its verdict."""
        if other.member.incarnation == self._me.incarnation:
            return True
        if self.log.verdict(other.index) is not None:
            return False
        if self._tell(other.member) is not False:
            return True
        self.log.decide(other.index, Verdict(ArrivalKind.GONE))
        return False

    def _judge(self, arrivals: Sequence[Arrival]) -> Verdict | _Doubt | None:
        """Return the group, if it is complete; or the conflict; or None while a worker is missing."""
        for each in self._foreign():
            if self._tell(each.member) is not False:
                return _Doubt(foreign(each), self._pace.gather)
            self.log.decide(each.index, Verdict(ArrivalKind.GONE))
        match examine(arrivals, self._arrival.world_size):
            case tuple() as group:
                if self._drop_dead(each for each in group if each.index < self._index):
                    return None
                reason = self._who_has_our_place() or self._dynamic_before(min(each.index for each in group))
                if reason is not None:  # another group meets here, or the previous one is just ending
                    return _Doubt(reason, self._pace.settle)
                members = tuple(arrival.member for arrival in group)
                return Verdict(ArrivalKind.COMPLETE, self.log.form(self._me.incarnation, members))
            case Conflict(reason, involved) if not self._drop_dead(involved):
                all_here = len(arrivals) >= self._arrival.world_size
                return _Doubt(reason, self._pace.settle if all_here else self._pace.gather)
        return None

    def _drop_dead(self, arrivals: Iterable[Arrival]) -> bool:
        """Skip arrivals of workers that are certainly dead; returns whether there were any."""
        others = [each for each in arrivals if each.member.incarnation != self._me.incarnation]
        dead = dead_among((each.member for each in others), self._tell)
        for each in self._arrivals():
            if each.member.incarnation in dead:
                self.log.decide(each.index, Verdict(ArrivalKind.GONE))
        return bool(dead)

    def _who_has_our_place(self) -> str | None:
        """Return an error text if a living worker of the latest group has our rank or name. It is dead if a
        worker that has arrived now has its address.
        """
        me = self._me
        members = self.log.last_group()
        arrived = {address for arrival in self._arrivals() for address in arrival.member.addresses}
        for member in members:
            same_rank, same_name = member.id == me.id, member.name == me.name
            if (
                (same_rank or same_name)
                and member.incarnation != me.incarnation
                and arrived.isdisjoint(member.addresses)
                and self._tell(member)
            ):
                what = f"rank {member.id}" if same_rank else f"name '{member.name}'"
                return (
                    f"{self._arrival} cannot join: the {what} is not unique. Worker '{member.name}' (rank "
                    f"{member.id}) has it, in the group of {len(members)} that is complete and running. If "
                    f"that is another job's, choose another port or file for this one."
                )
        return None

    def _dynamic_before(self, index: int) -> str | None:
        """Return an error text if a worker of a dynamic group lives that arrived before."""
        names = []
        for entry in self.log.read():
            if entry.foreign is not None:
                continue  # handled by ``_judge``
            if entry.arrival is None:
                self.log.decide(entry.index, Verdict(ArrivalKind.GONE))  # it has to arrive after us
                continue
            arrival, member = entry.arrival, entry.arrival.member
            if entry.index < index and not arrival.world_size and self._tell(member) is not False:
                names.append(member.name)
        return mixed("a dynamic group", names) if names else None

    def _out_of_time(self) -> Verdict:
        world_size = self._arrival.world_size
        present = [each.member.id for each in self._arrivals()]
        return Verdict(
            ArrivalKind.TIMEOUT,
            f"{self._arrival} waited {self._waiting.timeout:g} s at {self._store.description} for a group of "
            f"{world_size}. {describe_ranks(present, world_size)} {WHAT_TO_CHECK}",
        )

    def _give(self, verdict: Verdict) -> Verdict:
        """Write the coordinator's verdict for all arrivals. Returns ours: an earlier one takes precedence."""
        given = self.log.decide(self._index, verdict) if self._coordinates else self.log.verdict(self._index)
        if given is not None and given.kind is not ArrivalKind.GONE:
            verdict = given
        if self._coordinates:
            arrivals = [*self._arrivals(), *self._foreign()]
            self._others = [each for each in arrivals if each.member.incarnation != self._me.incarnation]
            for each in self._others:
                self.log.decide(each.index, verdict)
            self.log.trim()
        return verdict

    def _await_readers(self, unread: dict[int, Member]) -> None:
        """Wait, up to a limit, until all living workers have read their verdict: this process may serve the
        store.
        """
        waiting = StoreWait(min(self._pace.farewell, self._waiting.remaining + 1))
        backoff = Backoff(waiting, 0.01)
        probed_at = time.monotonic()
        while unread and not self._store.has(*(f"arrival/{index}/read" for index in unread)):
            if time.monotonic() - probed_at > 1:
                probed_at = time.monotonic()
                dead = dead_among(unread.values(), self._tell)
                unread = {
                    index: member
                    for index, member in unread.items()
                    if member.incarnation not in dead and not self._store.has(f"arrival/{index}/read")
                }
            if not backoff.pause():
                return
