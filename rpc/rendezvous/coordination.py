"""What the worker of rank 0 does for a static group: see that it is complete, and tell everybody.

``static`` has the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from rpc.errors import GroupMismatchError
from rpc.rendezvous.arrival_log import ArrivalLog
from rpc.rendezvous.arrivals import Arrival, Complete, Conflict, Incomplete, examine
from rpc.rendezvous.liveness import Probe, dead_among
from rpc.rendezvous.mode import enter_static
from rpc.rendezvous.store import SharedStore
from rpc.rendezvous.waiting import Abandoned, Backoff, OutOfTime, Waiting

__all__ = ["DEFAULT_PACE", "Coordinator", "Pace", "Verdict", "describe_ranks", "who_has_the_place_of"]


@dataclass(frozen=True)
class Pace:
    """How patient the protocol is, in seconds.

    Attributes:
        hole: for a record whose place is taken but which is not there.
        settle: with a conflict that a dying process may resolve.
        gather: for the rest of the group once there is a conflict, so that all hear of it.
        latecomer: between looks at who has taken one's place.
        farewell: for the others to read their verdict.
    """

    hole: float = 1.0
    settle: float = 0.5
    gather: float = 5.0
    latecomer: float = 2.0
    farewell: float = 10.0


DEFAULT_PACE = Pace()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an arrival.

    Attributes:
        kind: ``complete``, ``mismatch``, ``timeout`` or ``interrupted``.
        detail: the generation of a complete group, else the reason.
    """

    kind: str
    detail: str

    def pack(self) -> bytes:
        """As a record for the store."""
        packed: bytes = msgpack.packb([self.kind, self.detail])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Verdict:
        """The reverse of ``pack``."""
        kind, detail = msgpack.unpackb(packed)
        return cls(str(kind), str(detail))


class Coordinator:
    """Collects arrivals until they are a group or cannot be one, and publishes the verdict.

    Args:
        store: under the job's prefix.
        log: the arrivals in it.
        me: rank 0's own arrival.
        waiting: the deadline.
        tell: tells whether a member lives.
        pace: how patient to be.
    """

    def __init__(
        self, store: SharedStore, log: ArrivalLog, me: Arrival, waiting: Waiting, tell: Probe, pace: Pace
    ) -> None:
        self._store = store
        self._log = log
        self._me = me
        self._waiting = waiting
        self._tell = tell
        self._pace = pace
        self._arrivals: list[Arrival] = []

    def run(self) -> Verdict:
        """Returns the verdict on this worker too, once the others have read theirs."""
        try:
            verdict = self._judge()
        except OutOfTime:
            present = [arrival.member.id for arrival in self._arrivals]
            verdict = Verdict(
                "timeout",
                f"{self._me} waited {self._waiting.timeout:g} s at {self._store.description} for a group of "
                f"{self._me.world_size}. {describe_ranks(present, self._me.world_size)}",
            )
        except Abandoned:
            self._publish(Verdict("interrupted", f"{self._me}, who coordinates the group, was interrupted."))
            raise
        if verdict is None:
            packed = self._store.get(f"verdict/{self._me.member.incarnation}")
            assert packed is not None
            return Verdict.unpack(packed)
        self._publish(verdict)
        self._wait_for_readers()
        return verdict

    def _judge(self) -> Verdict | None:
        """The verdict on all that have arrived; None if an earlier claimant of rank 0 has published one."""
        me = self._me
        backoff = Backoff(self._waiting, min(0.5, max(0.02, me.world_size / 2000)))
        conflict_at: float | None = None
        taken_at: float | None = None
        looked_at = time.monotonic()
        while True:
            if self._log.has_verdict(me):
                return None
            arrivals = self._log.read()
            if len(arrivals) != len(self._arrivals):
                backoff.restart()
            self._arrivals = arrivals
            match examine(arrivals, me.world_size):
                case Complete(group):
                    if self._drop_dead([each for each in group if each.index < self._own_index(group)]):
                        continue
                    taken = who_has_the_place_of(me, self._log, self._tell)
                    if taken is not None:  # another job meets here, or the last group is just ending
                        taken_at = taken_at or time.monotonic()
                        if time.monotonic() - taken_at >= self._pace.settle:
                            return Verdict("mismatch", taken)
                        backoff.pause()
                        continue
                    try:
                        enter_static(self._store, self._tell)
                    except GroupMismatchError as error:
                        return Verdict("mismatch", str(error))
                    return self._form(group)
                case Conflict(reason, involved):
                    if self._drop_dead(involved):
                        continue
                    conflict_at = conflict_at or time.monotonic()
                    all_here = len(arrivals) >= me.world_size
                    patience = self._pace.settle if all_here else self._pace.gather
                    if time.monotonic() - conflict_at >= patience:
                        return Verdict("mismatch", reason)
                case Incomplete():
                    conflict_at = None
                    if time.monotonic() - looked_at >= self._pace.latecomer:
                        looked_at = time.monotonic()
                        taken = who_has_the_place_of(me, self._log, self._tell)
                        if taken is not None:
                            return Verdict("mismatch", taken)
            backoff.pause()

    def _own_index(self, group: Sequence[Arrival]) -> int:
        return next(each.index for each in group if each.member.incarnation == self._me.member.incarnation)

    def _drop_dead(self, arrivals: Sequence[Arrival]) -> bool:
        """Forget those that are certainly dead; returns whether there were any."""
        others = [each for each in arrivals if each.member.incarnation != self._me.member.incarnation]
        dead = dead_among((each.member for each in others), self._tell)
        self._log.drop([each for each in others if each.member.incarnation in dead])
        return bool(dead)

    def _form(self, group: Sequence[Arrival]) -> Verdict:
        generation = f"{self._store.add('generation', 1)}-{self._me.member.incarnation:x}"
        self._store.set(f"group/{generation}", msgpack.packb([each.member.to_wire() for each in group]))
        self._store.set("last", generation.encode())
        return Verdict("complete", generation)

    def _publish(self, verdict: Verdict) -> None:
        for arrival in self._arrivals:
            self._store.set(f"verdict/{arrival.member.incarnation}", verdict.pack())
        self._store.set("consumed", str(self._log.position).encode())

    def _wait_for_readers(self) -> None:
        """Stay until all have read their verdict: this process may serve the store. Not for ever."""
        now = time.monotonic()
        deadline = now + min(self._pace.farewell, self._waiting.remaining + 1)
        next_probe = now + 1
        pause = 0.001
        own = self._me.member.incarnation
        readers = [each.member for each in self._arrivals if each.member.incarnation != own]
        while True:
            readers = [each for each in readers if not self._store.has(f"ready/{each.incarnation}")]
            if not readers or time.monotonic() > deadline:
                return
            if time.monotonic() > next_probe:
                next_probe = time.monotonic() + 1
                dead = dead_among(readers, self._tell)
                readers = [each for each in readers if each.incarnation not in dead]
            try:
                self._waiting.pause(pause)
            except OutOfTime:
                time.sleep(pause)
            pause = min(pause * 1.5, 0.05)


def who_has_the_place_of(me: Arrival, log: ArrivalLog, tell: Probe) -> str | None:
    """Whether a living worker of the group last formed has our rank or name; says so in a sentence.

    One whose address somebody has who has arrived now is no more: an address serves one process at a time.
    """
    members = log.formed()
    arrived = {address for arrival in log.read() for address in arrival.member.addresses}
    for member in members:
        same_rank, same_name = member.id == me.member.id, member.name == me.member.name
        if (
            (same_rank or same_name)
            and member.incarnation != me.member.incarnation
            and arrived.isdisjoint(member.addresses)
            and tell(member)
        ):
            what = f"rank {member.id}" if same_rank else f"name '{member.name}'"
            return (
                f"{me} cannot join: the {what} is not unique. Worker '{member.name}' (rank {member.id}) has "
                f"it, in the group of {len(members)} that is complete and running. If that is another job's, "
                f"choose another port or file for this one."
            )
    return None


def describe_ranks(present: Sequence[int], world_size: int) -> str:
    """Who arrived, who is missing, and what to look at."""

    def listed(ranks: Sequence[int]) -> str:
        shown = ", ".join(map(str, ranks[:20]))
        return f"{shown} and {len(ranks) - 20} more" if len(ranks) > 20 else shown or "none"

    here = sorted(set(present))
    missing = sorted(set(range(world_size)) - set(here))
    return (
        f"Ranks that arrived: {listed(here)}; missing: {listed(missing)}. Check that every worker was "
        f"started, and with the same world size, rendezvous address and job."
    )
