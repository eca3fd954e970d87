"""Static groups: a number of workers, known beforehand, that start together.

*The log.* Each worker appends its arrival to a log in the store (a counter gives the place, a key holds the
record) and then waits for a verdict under a key that carries its own incarnation. Nothing else is ever
waited for, so nothing left behind by an earlier group or attempt can be taken for an answer, and a store
serves any number of groups in a row, without a counter that processes would have to keep in step.

*The coordinator* is the worker of rank 0 (if several claim that rank, the earliest that lives). It reads
the log from where the last group's coordinator stopped, until every rank has arrived, and then publishes the
group and a verdict for each. What cannot be one group is refused, for everybody who has arrived, by a
verdict that says why.

*The dead.* An attempt that was killed leaves arrivals of dead processes. So before arrivals in conflict are
refused, and before arrivals older than the coordinator's own are accepted, they are probed: does somebody
still listen there? Those of the dead are dropped.

*The end.* The coordinator stays until all have read their verdict, since its process may serve the store;
after that nobody needs it.

*Latecomers.* A worker that arrives when its group is complete, because its rank or name was given twice,
finds nobody coordinating. If a living worker of the group last formed has its place, it gives up and says so.
So does a coordinator, for all who have arrived: theirs is another job, which happens to meet here too.
"""

from __future__ import annotations

import contextlib
import time

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous.arrival_log import ArrivalLog
from rpc.rendezvous.arrivals import Arrival, arrival_of
from rpc.rendezvous.coordination import (
    DEFAULT_PACE,
    Coordinator,
    Pace,
    Verdict,
    describe_ranks,
    who_has_the_place_of,
)
from rpc.rendezvous.group import Group
from rpc.rendezvous.liveness import Probe, probe
from rpc.rendezvous.store import SharedStore, StoreLost
from rpc.rendezvous.waiting import Abandoned, Backoff, OutOfTime, Waiting, run_with_deadline

__all__ = ["join_static"]


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
        store: where they meet.
        me: this worker. It listens on its addresses already.
        world_size: the number of workers.
        timeout: seconds to wait for all others.
        job: keeps jobs apart that share a store.
        tell: tells whether a member lives.
        pace: how patient to be.

    Raises:
        GroupMismatchError: a name or rank is taken twice, a rank is outside the group, world sizes differ,
            or a dynamic group lives in this store. Everybody who has arrived gets it.
        RendezvousTimeoutError: not all have arrived in time; says who is missing.
        RendezvousError: rank 0 was interrupted, or the store failed.
    """
    arrival = arrival_of(me, world_size)

    def work(waiting: Waiting) -> Group:
        joining: _Joining | None = None

        def join() -> Group:
            nonlocal joining
            joining = _Joining(store.under(f"farcall/{job}"), arrival, waiting, tell, pace)
            verdict = joining.await_verdict()
            return Group(me, _obey(verdict, joining.log), f"{job}/{verdict.detail}", static=True)

        try:
            return store.outlast(waiting, join)
        except OutOfTime:
            assert joining is not None
            joining.give_up()
            present = joining.present_ranks()
            late = joining.late_verdict()
            if late is not None and late.kind != "complete":
                _obey(late, joining.log)  # rank 0, out of time as well, has just said what is wrong
            raise RendezvousTimeoutError(
                f"{arrival} waited {timeout:g} s at {store.description} for a group of {world_size}. "
                + describe_ranks(present, world_size)
            ) from None

    return run_with_deadline(work, timeout, store.description)


class _Joining:
    """One worker's way to its verdict. Lives on the helper thread."""

    def __init__(
        self, store: SharedStore, arrival: Arrival, waiting: Waiting, tell: Probe, pace: Pace
    ) -> None:
        self._store = store
        self._arrival = arrival
        self._waiting = waiting
        self._tell = tell
        self._pace = pace
        self.log: ArrivalLog | None = None

    def await_verdict(self) -> Verdict:
        me = self._arrival.member
        self.log = log = ArrivalLog(self._store, self._pace.hole)
        index = log.append(self._arrival)
        backoff = Backoff(self._waiting, min(0.5, max(0.02, self._arrival.world_size / 2000)))
        looked_at = time.monotonic()
        while (packed := self._store.get(f"verdict/{me.incarnation}")) is None:
            if me.id == 0 and self._coordinates(log):
                verdict = Coordinator(
                    self._store, log, self._arrival, self._waiting, self._tell, self._pace
                ).run()
                break
            if time.monotonic() - looked_at >= self._pace.latecomer:
                looked_at = time.monotonic()
                if log.has_passed(index) and not log.has_verdict(self._arrival):
                    # This process was so slow between the two steps of appending that it was given up.
                    index = log.append(self._arrival)
                self._raise_if_late(log)
            backoff.pause()
        else:
            verdict = Verdict.unpack(packed)
        self._store.set(f"ready/{me.incarnation}", b"1")
        return verdict

    def _coordinates(self, log: ArrivalLog) -> bool:
        """Whether this is the earliest living claimant of rank 0 that waits for a group."""
        for claimant in log.read():
            if claimant.member.incarnation == self._arrival.member.incarnation:
                return True
            if claimant.member.id == 0 and not log.has_verdict(claimant):
                if self._tell(claimant.member) is not False:
                    return False
                log.drop([claimant])
        return False

    def _raise_if_late(self, log: ArrivalLog) -> None:
        coordinators = [each for each in log.read() if each.member.id == 0]
        if any(self._tell(each.member) is not False for each in coordinators):
            return
        taken = who_has_the_place_of(self._arrival, log, self._tell)
        if taken is not None:
            raise GroupMismatchError(taken)

    def give_up(self) -> None:
        """The coordinator need not wait for this worker to read its verdict."""
        with contextlib.suppress(StoreLost):
            self._store.set(f"ready/{self._arrival.member.incarnation}", b"1")

    def late_verdict(self) -> Verdict | None:
        """The verdict, if it came at the very moment that time was over."""
        try:
            packed = self._store.get(f"verdict/{self._arrival.member.incarnation}")
        except (StoreLost, Abandoned, OutOfTime):
            return None
        return None if packed is None else Verdict.unpack(packed)

    def present_ranks(self) -> list[int]:
        """The ranks that have arrived, as far as the store still says."""
        try:
            return [each.member.id for each in self.log.read()] if self.log else []
        except (StoreLost, Abandoned, OutOfTime):
            return []


def _obey(verdict: Verdict, log: ArrivalLog | None) -> tuple[Member, ...]:
    match verdict.kind:
        case "complete":
            assert log is not None
            return log.members(verdict.detail)
        case "mismatch":
            raise GroupMismatchError(verdict.detail)
        case "timeout":
            raise RendezvousTimeoutError(verdict.detail)
        case _:
            raise RendezvousError(verdict.detail)
