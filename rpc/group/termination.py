"""Termination: decides when the workers of a static group may leave together. A pure state machine.

*Theory.* Calls cause calls, so finding each worker idle in turn proves little: a call may have moved in the
meantime from a worker not yet asked to one asked already. Mattern's four-counter method ("Algorithms for
distributed termination detection", 1987) asks twice, and compares the counts of messages sent and received.
Here, everything in flight is under way at its sender: a call until it is answered, a control message until it
is acknowledged. So two numbers per worker are enough: what is *active*, and how much has ever *begun*. If two
waves of questions, the second after the end of the first, find all workers idle and the same counts, then
nothing began and nothing was active anywhere between them, so nothing can ever begin again.

*The leader* is the living worker of the lowest rank. Each worker notifies it when it has *entered* shutdown.
When all living ones have, the leader sends a *probe* to each, which answers with a *report*; a worker that
was busy sends *changed* when it no longer is, and only then there is another wave. After two clean and equal
waves the leader sends *quiescent*.

*Deaths.* A message of a dead worker may still arrive somewhere. So a probe names the dead workers, and a
worker that still has a connection to one closes it, which discards what was unread. If only the connection
between two living workers broke, both must have noticed. A worker that loses another sends *changed*. If the
leader dies, all workers announce themselves to the next. A worker that leaves ungracefully counts as dead.

*Rounds.* When all work has ended, references are released, which causes messages again. So shutdown takes
several rounds, each entered by every worker and each ending in quiescence. Messages carry their round: one of
a later round proves that the earlier one is over, one of an earlier round is answered by saying that it is
over.

Messages must arrive, in any order, unless their sender or receiver dies; duplicates and delays do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.group.workers import Member

__all__ = [
    "Action",
    "ActivityReport",
    "CutOff",
    "Failed",
    "Leave",
    "Quiescent",
    "SendToWorker",
    "Termination",
    "Waits",
]

_ANSWER_SECONDS: Final = 1.0
"""Time in seconds that the leader may take to answer what a timed-out round waits for."""


@dataclass(frozen=True, slots=True)
class ActivityReport:
    """A worker's state at one moment; ``begun`` is read before ``active``.

    ``active`` is the number of operations under way: calls, requests, tasks, callbacks, control messages that
    are not acknowledged; ``begun`` is the number of these that have ever begun.
    """

    active: int
    begun: int = 0


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send a message (a list that msgpack can encode) to a worker; pass it to ``receive`` there."""

    incarnation: int
    message: list[Any]


@dataclass(frozen=True, slots=True)
class CutOff:
    """The leader considers this worker dead: close the connection to it, then report it ``lost``."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Quiescent:
    """The round is over: nothing is under way on any worker. Enter the next."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The last round is over: send what is still queued, and leave."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The timeout has expired; ``reason`` names the workers that have not entered, are busy, or have not
    answered.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Waits:
    """The answer to ``inquire``: the workers that have not entered shutdown, are busy, or have not
    answered.
    """

    reason: str


Action = SendToWorker | CutOff | Quiescent | Leave | Failed | Waits

Wave = dict[int, tuple[frozenset[int], ActivityReport]]
"""For each worker, by incarnation: the workers that it has lost, and its report."""


class Termination:
    """One worker's part. Every method returns the actions to perform; for one thread.

    Workers are identified by their incarnations. ``now`` is a monotonic clock in seconds, ``report`` is this
    worker's current report.

    Args:
        me: this worker.
        members: all workers of the group, including this one.
        rounds: number of rounds.
    """

    def __init__(self, me: Member, members: Iterable[Member], rounds: int = 1) -> None:
        self._me = me.incarnation
        self._members = {member.incarnation: member for member in members}
        self._alive = set(self._members)
        self._rounds = rounds
        self._round = 0
        self._entered: set[int] = set()
        """Workers that are known to have entered the current round."""
        self._over = False
        self._deadline: float | None = None
        self._answer_by: float | None = None
        self._inquires = False
        self._owes: tuple[int, frozenset[int]] | None = None
        """The worker that probed this one when it was not clean, and the workers that it considers dead."""
        # At the leader:
        self._wave = 0
        self._reports: Wave | None = None
        """Reports of the wave in progress."""
        self._proof: Wave | None = None
        """The last wave, if it was clean."""
        self._busy: dict[int, int] = {}
        """Active operations found by the last wave; 0 for a worker that disagrees with others about
        the dead.
        """
        self._news = False
        """Whether anything may have changed since the last wave began."""
        self._actions: list[Action] = []

    # ---- queries

    @property
    def leader(self) -> int:
        """The living worker with the lowest rank."""
        return min(self._alive, key=lambda incarnation: self._members[incarnation].id)

    @property
    def next_tick(self) -> float | None:
        """When ``tick`` is due, on the clock of ``now``; None if it is not."""
        if self._over:
            return None
        return min((time for time in (self._deadline, self._answer_by) if time is not None), default=None)

    @property
    def awaits_idleness(self) -> bool:
        """Whether ``became_idle`` would make a difference now."""
        return not self._over and self._owes is not None

    # ---- events

    def enter(self, now: float, report: ActivityReport, timeout: float = 0.0) -> list[Action]:
        """Enter shutdown, or its next round; it fails after ``timeout`` seconds (0: never)."""
        if self._over or self._has_entered:
            return []
        self._deadline = now + timeout if timeout > 0 else None
        self._entered.add(self._me)
        self._tell_leader("entered")
        return self._go_on(report)

    def inquire(self, report: ActivityReport) -> list[Action]:
        """Find out what the round waits for: returns ``Waits``, now or when the leader has answered."""
        if not self._over and self._has_entered:
            if self._leads:
                self._actions.append(Waits(self._standing(self._missing, self._awaited)))
            else:
                self._inquires = True
                self._send(self.leader, "ask")
        return self._go_on(report)

    def became_idle(self, report: ActivityReport) -> list[Action]:
        """Record that nothing is under way here any more. May be called whenever that may be so."""
        if not self._over:
            self._tell_if_clean(report)
        return self._go_on(report)

    def lost(self, incarnation: int, now: float, report: ActivityReport) -> list[Action]:
        """Record that a worker is gone, for any reason, and none of its messages will be received
        any more.
        """
        if self._over or incarnation not in self._alive or incarnation == self._me:
            return []
        followed = self.leader
        self._alive.discard(incarnation)
        self._entered.discard(incarnation)
        self._reports = self._proof = None  # a wave in progress does not count
        self._busy.pop(incarnation, None)
        self._news = True
        if self._owes is not None and self._owes[0] == incarnation:
            self._owes = None
        if incarnation == followed:
            if self._has_entered:
                self._tell_leader("entered")
            if self._answer_by is not None and self._leads:  # it does not know yet which others are there
                self._fail(f"its leader, {self._name(incarnation)}, is gone")
            elif self._answer_by is not None:
                self._ask(now)
        elif self._owes is not None:
            self._tell_if_clean(report)
        elif self._has_entered:
            self._tell_leader("changed")
        return self._go_on(report)

    def receive(self, sender: int, message: Any, now: float, report: ActivityReport) -> list[Action]:
        """Handle a message of another worker's termination; ``ProtocolError`` if it is malformed."""
        match message:
            case [int(number), str(kind), *details]:
                pass
            case _:
                raise ProtocolError(f"not a shutdown message: {str(message)[:100]}")
        if sender not in self._alive:
            return []
        if number < self._round:
            if kind in ("entered", "probe", "ask"):
                self._send(sender, "quiescent", round_number=number)
            return self._go_on(report)
        while number > self._round and not self._over and self._has_entered:
            self._finish_round()
        if not self._over and number == self._round:
            try:
                self._take(sender, kind, details, report)
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"a malformed shutdown message: {kind} {str(details)[:100]}") from error
        return self._go_on(report)

    def tick(self, now: float, report: ActivityReport) -> list[Action]:
        """Handle the time that ``next_tick`` returned. Being early or late does no harm."""
        if self._over:
            return []
        if self._answer_by is not None and now >= self._answer_by:
            self._fail(f"its leader, {self._name(self.leader)}, does not answer")
        elif self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._ask(now)
        return self._go_on(report)

    # ---- every worker

    @property
    def _leads(self) -> bool:
        return self.leader == self._me

    @property
    def _has_entered(self) -> bool:
        return self._me in self._entered

    @property
    def _lost(self) -> frozenset[int]:
        return frozenset(self._members.keys() - self._alive)

    def _take(self, sender: int, kind: str, details: list[Any], report: ActivityReport) -> None:
        match kind, details:
            case "entered", []:
                self._entered.add(sender)
                self._news = True
            case "changed", []:
                self._news = True
            case "probe", [int(wave), list(dead)]:
                self._owe_if_unclean(sender, frozenset(dead), report)
                self._send(sender, "report", wave, sorted(self._lost), report.active, report.begun)
            case "report", [int(wave), list(lost), int(active), int(begun)]:
                if self._reports is not None and wave == self._wave:
                    self._reports[sender] = frozenset(lost), ActivityReport(active, begun)
            case "quiescent", []:
                if self._has_entered:
                    self._finish_round()
            case "ask", []:
                busy = [list(each) for each in self._awaited.items()]
                self._send(sender, "status", sorted(self._missing), busy)
            case "status", [list(missing), busy]:
                if self._answer_by is not None:
                    self._fail(self._standing(missing, dict(busy)))
                elif self._inquires:
                    self._inquires = False
                    self._actions.append(Waits(self._standing(missing, dict(busy))))
            case _:
                raise ProtocolError(f"not a shutdown message: {kind} {str(details)[:100]}")

    def _owe_if_unclean(self, leader: int, dead: frozenset[int], report: ActivityReport) -> None:
        connected_to_dead = dead & self._alive - {self._me}
        self._actions.extend(CutOff(each) for each in sorted(connected_to_dead))
        if connected_to_dead or report.active:
            self._owes = leader, dead

    def _tell_if_clean(self, report: ActivityReport) -> None:
        """Notify the worker that probed this one when it was not clean, once it is clean."""
        if self._owes is not None and not report.active and not self._owes[1] & self._alive - {self._me}:
            self._owes = None
            self._tell_leader("changed")

    def _tell_leader(self, kind: str) -> None:
        if self._leads:
            self._news = True
        else:
            self._send(self.leader, kind)

    def _finish_round(self) -> None:
        # A worker that has announced itself here waits for this answer, even if the round's end is known from
        # another: the leader may have died after notifying only some workers.
        for incarnation in sorted((self._alive if self._leads else self._entered) - {self._me}):
            self._send(incarnation, "quiescent")
        self._round += 1
        self._entered = set()
        self._deadline = self._answer_by = self._owes = None
        self._reports = self._proof = None
        self._busy = {}
        self._over = self._round == self._rounds
        self._actions.append(Leave() if self._over else Quiescent())

    # ---- the leader

    @property
    def _missing(self) -> set[int]:
        return self._alive - self._entered

    def _go_on(self, report: ActivityReport) -> list[Action]:
        """Do what a leader can do now, and return all actions."""
        while not self._over and self._leads and not self._missing:
            if self._reports is None:
                if not self._news:
                    break
                self._start_wave(report)
            elif self._alive <= self._reports.keys():
                self._judge_wave(self._reports)
            else:
                break
        actions, self._actions = self._actions, []
        return actions

    def _start_wave(self, report: ActivityReport) -> None:
        self._news = False
        self._wave += 1
        lost = self._lost
        self._reports = {self._me: (lost, report)}
        self._owe_if_unclean(self._me, lost, report)
        for incarnation in sorted(self._alive - {self._me}):
            self._send(incarnation, "probe", self._wave, sorted(lost))

    def _judge_wave(self, reports: Wave) -> None:
        self._reports = None
        odds = self._at_odds(reports)
        self._busy = {
            worker: report.active
            for worker, (_, report) in reports.items()
            if report.active or worker in odds
        }
        if self._busy:
            self._proof = None
        elif reports == self._proof:
            self._finish_round()
        else:
            self._proof = reports
            self._news = True  # the second wave follows at once

    def _at_odds(self, reports: Wave) -> set[int]:
        """Return the workers that have not lost one of the dead, or were lost by a worker that they have not
        lost.
        """
        dead = self._lost
        return {
            worker
            for worker, (lost, _) in reports.items()
            if not dead <= lost or any(worker in reports[other][0] for other in reports.keys() - lost)
        }

    @property
    def _awaited(self) -> dict[int, int]:
        """Return the busy workers with their counts and, with 0, those whose answer to a probe is awaited."""
        if self._reports is None:
            return self._busy
        reported = {worker: report.active for worker, (_, report) in self._reports.items() if report.active}
        return reported | {each: self._busy.get(each, 0) for each in self._alive - self._reports.keys()}

    # ---- timeouts and error texts

    def _ask(self, now: float) -> None:
        """Find out what the round waits for, after the timeout has expired."""
        if self._leads:
            self._fail(self._standing(self._missing, self._awaited))
        else:
            self._answer_by = now + _ANSWER_SECONDS
            self._send(self.leader, "ask")

    def _send(self, to: int, kind: str, *details: Any, round_number: int | None = None) -> None:
        number = self._round if round_number is None else round_number
        self._actions.append(SendToWorker(to, [number, kind, *details]))

    def _fail(self, why: str) -> None:
        self._over = True
        self._actions.append(Failed(f"shutdown timed out: {why}"))

    def _standing(self, missing: Collection[int], busy: Mapping[int, int]) -> str:
        """Describe what the round waits for."""
        by_rank = sorted(self._members, key=lambda incarnation: self._members[incarnation].id)
        absent = [self._name(each) for each in by_rank if each in missing]
        working = [f"{self._name(each)} ({busy[each]} under way)" for each in by_rank if busy.get(each)]
        unheard = [self._name(each) for each in by_rank if busy.get(each) == 0]
        parts = [f"not in shutdown: {', '.join(absent)}"] if absent else []
        parts += [f"still busy: {', '.join(working)}"] if working else []
        parts += [f"no answer yet from: {', '.join(unheard)}"] if unheard else []
        return "; ".join(parts) or "not all workers have answered"

    def _name(self, incarnation: int) -> str:
        return f"worker '{self._members[incarnation].name}'"
