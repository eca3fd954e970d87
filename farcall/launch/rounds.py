"""When the workers of a job run, stop, restart and end, on all machines: plain data and pure functions.

The launchers of a job meet in a store, which one of them serves, the *coordinator*. Each launcher reports on
its own workers; the coordinator gives the orders, which all follow::

    (meet) -> RUN 0 -> STOP 0 -> RUN 1 -> ... -> END

=======  ==================================================  ====================================
order    given when                                          answered with
=======  ==================================================  ====================================
RUN k    all launchers have come; or all have STOPPED k - 1  RUNNING k, then DONE k or FAILED k
STOP k   any has FAILED k                                    STOPPED k, with all its failures
END      all are DONE; no restart is left; a worker is       LEFT
         preempted; a launcher leaves, is silent, or does
         not stop
=======  ==================================================  ====================================

*The job ends.* It does not wait for a launcher that is silent, or that follows STOP or END too late. A
launcher that cannot reach the coordinator's store ends its workers. RUN alone has no limit; it is over as
soon as one worker fails, whatever the others have returned: a launcher that is DONE waits for the rest, and
runs its workers again if it is ordered to.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from farcall.launch.failures import Failure

__all__ = ["SILENT_SECONDS", "Coordinator", "Kind", "Launcher", "Order", "Report", "State", "placed"]

SILENT_SECONDS: Final = 10.0
"""Time in seconds without a sign of life after which a launcher counts as gone."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """One launcher of the job.

    Attributes:
        index: index in the order of arrivals; the coordinator's is 0.
        nodes: number of launchers that it expects.
        workers: number of its workers.
        host: name of its machine.
        pid: process number.
        node_rank: rank of its machine; None until it is known.
        first_rank: rank of its first worker, once placed.
        name: a random name, which no other launcher has.
    """

    index: int
    nodes: int
    workers: int
    host: str
    pid: int
    node_rank: int | None = None
    first_rank: int = 0
    name: str = ""

    def __str__(self) -> str:
        rank = "" if self.node_rank is None else f"node {self.node_rank}, "
        return f"the launcher on {self.host} ({rank}process {self.pid})"

    def pack(self) -> bytes:
        """Return a record for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Launcher:
        """Parse a record."""
        return cls(**json.loads(packed))


def placed(launchers: Sequence[Launcher]) -> tuple[tuple[Launcher, ...], str]:
    """Assign ranks to the launchers; returns them by node rank, and the reason why they cannot be one job, or
    "".

    The coordinator has node rank 0. If no ranks were given, the order of arrivals is used.
    """
    given = [each for each in launchers if each.node_rank is not None]
    if given and len(given) < len(launchers):
        without = next(each for each in launchers if each.node_rank is None)
        return (), f"{given[0]} was given its --node-rank, and {without} was not. Give it to all, or to none"
    taken: dict[int, Launcher] = {}
    for each in given:
        assert each.node_rank is not None
        other = taken.setdefault(each.node_rank, each)
        if other is not each:
            return (), f"{other} and {each} have the same --node-rank {each.node_rank}. Each needs its own"
    by_rank = sorted(launchers, key=lambda each: each.index if each.node_rank is None else each.node_rank)
    found, first = [], 0
    for rank, each in enumerate(by_rank):
        found.append(replace(each, node_rank=rank, first_rank=first))
        first += each.workers
    return tuple(found), ""


class State(enum.StrEnum):
    """State of a launcher's workers."""

    WAITING = "waiting"  # they have not been started
    RUNNING = "running"
    DONE = "done"  # all have succeeded
    FAILED = "failed"  # one has failed; the others are being ended
    STOPPED = "stopped"  # all have ended, as ordered
    LEFT = "left"  # all have ended, and the launcher ends


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a launcher.

    Attributes:
        state: state of its workers.
        round: the round that this is about.
        failures: failures of its workers in this round.
        leaves: reason why it is leaving by itself; "" if it is not.
        status: exit status of the job in that case.
    """

    state: State
    round: int = 0
    failures: tuple[Failure, ...] = ()
    leaves: str = ""
    status: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as values for the store."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Report:
        """Parse the result of ``to_json``."""
        failures = tuple(Failure(**each) for each in found["failures"])
        return cls(**found | {"state": State(found["state"]), "failures": failures})


class Kind(enum.StrEnum):
    """Kind of an order."""

    RUN = "run"
    STOP = "stop"
    END = "end"


@dataclass(frozen=True, slots=True)
class Order:
    """An order to all launchers.

    Attributes:
        kind: whether workers run, stop, or end for good.
        round: the round that must run, or stop.
        failure: the failure that has led to it: in STOP the first that was reported, in END the cause.
        reason: another reason for END; "" if there is none.
        status: exit status of the job, in END.
    """

    kind: Kind
    round: int = 0
    failure: Failure | None = None
    reason: str = ""
    status: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as values for the store."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Order:
        """Parse the result of ``to_json``."""
        failure = Failure(**found["failure"]) if found["failure"] else None
        return cls(**found | {"kind": Kind(found["kind"]), "failure": failure})


class Coordinator:
    """Gives the orders of one job.

    Args:
        launchers: all that take part, by node rank.
        restarts: maximum number of restarts of all workers.
        stop_seconds: time in seconds that a launcher may take to end its workers.
    """

    def __init__(self, launchers: Sequence[Launcher], restarts: int, stop_seconds: float) -> None:
        self._launchers = launchers
        self._restarts = restarts
        self._stop_seconds = stop_seconds
        self._since = 0.0
        self.order = Order(Kind.RUN)

    def step(self, reports: Mapping[int, Report], silent: Mapping[int, float], now: float) -> bool:
        """Give the next order, if it is due.

        Args:
            reports: the last report of each launcher, by its index.
            silent: time in seconds for which each has been silent.
            now: time, on a monotonic clock.

        Returns:
            Whether the job is over: after END, there is no launcher to wait for.
        """
        order = self.order
        said = [(each, reports.get(each.index, Report(State.WAITING))) for each in self._launchers]
        gone = [each for each, _ in said if silent.get(each.index, 0) > SILENT_SECONDS]
        late = now - self._since > self._stop_seconds
        if order.kind is Kind.END:
            return late or all(report.state is State.LEFT or each in gone for each, report in said)
        of_round = [report for _, report in said if report.round == order.round]
        failures = [failure for report in of_round for failure in report.failures]
        leaving = [(each, report) for each, report in said if report.leaves]
        if leaving:
            each, report = leaving[0]
            self._give(Order(Kind.END, reason=f"{each} {report.leaves}", status=report.status), now)
        elif gone:
            reason = f"{gone[0]} is gone: nothing has been heard of it for {SILENT_SECONDS:g} s"
            self.end(reason, now)
        elif order.kind is Kind.STOP:
            busy = [
                each
                for each, report in said
                if report.round != order.round or report.state is not State.STOPPED
            ]
            if not busy:
                self._after_stop(Failure.first(failures), now)
            elif late:
                reason = f"{busy[0]} has not ended its workers within {self._stop_seconds:g} s"
                self.end(reason, now)
        elif any(report.state is State.FAILED for report in of_round):
            self._give(Order(Kind.STOP, order.round, Failure.first(failures)), now)
        elif len(of_round) == len(said) and all(report.state is State.DONE for report in of_round):
            self._give(Order(Kind.END), now)
        return False

    def end(self, reason: str, now: float) -> None:
        """End the job for a reason that the launchers have not reported."""
        self._give(Order(Kind.END, reason=reason, status=1), now)

    def _after_stop(self, failure: Failure, now: float) -> None:
        if self.order.round < self._restarts and not failure.wants_requeue:
            self._give(Order(Kind.RUN, self.order.round + 1, failure), now)
        else:
            self._give(Order(Kind.END, self.order.round, failure, status=failure.exit_status), now)

    def _give(self, order: Order, now: float) -> None:
        self.order, self._since = order, now
