"""When may everybody leave? Graceful shutdown of a static group, as a pure object.

Calls cause calls, so that every worker has called ``shutdown`` and is idle means little: a call may be on
its way, and the worker that it reaches may call any other. What must be found is a moment at which *all*
workers were idle and *nothing* was on its way. Nobody sees all workers at one moment; ``counting`` does it
(Mattern's four-counter method, "Algorithms for distributed termination detection", 1987).

*The leader* is the living worker of the lowest rank. Each worker tells it when it enters shutdown. When all
living ones have, the leader sends a *probe* to everybody, and each answers with a *report*: how much it has
under way, and how many messages that can cause work it has ever sent to and received from each peer. Two
waves of probes in a row that find everybody idle, what each has sent received by the other, and the counts
of the second equal to those of the first prove it: between the waves nobody did anything, so at that time
nobody could and nothing was on its way. Then the leader says *quiescent*, and everybody may leave.

*Deaths.* Counts towards and from the dead are left out. A message of a dead worker could still arrive
somewhere; so a probe names the dead, and who still has a connection to one of them is not clean: it cuts it
off, which throws away what was unread, and reports again. Where only the connection between two living
workers broke, both must have noticed. If the leader dies, all announce themselves to the
next one. A worker that leaves ungracefully is one more dead.

*Quiet.* No wave starts before all have entered, and none after an unclean one before somebody has become
clean and said so; only messages on their way, of which nobody will say anything, are waited for by asking
again, ever more slowly.

*Rounds.* When work has ceased, references are given back, which makes messages again, and when that is over,
everybody looks whether some are left. So shutdown takes several rounds, each entered by every worker and
each ending in quiescence. Messages carry their round: one of a later round proves that the earlier is over,
one of an earlier is answered by saying that it is over.

Messages must arrive, in any order, unless their sender or receiver dies; doubled or late ones do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rpc.errors import ProtocolError
from rpc.group.counting import Peer, Report, is_balanced
from rpc.group.workers import Member

__all__ = ["Action", "CutOff", "Failed", "Leave", "Quiescent", "Send", "Termination"]

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
_ANSWER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message (a list that msgpack can encode) to a peer; pass it to ``receive`` there."""

    peer: Peer
    message: list[Any]


@dataclass(frozen=True, slots=True)
class CutOff:
    """The leader holds this peer to be dead: close the connection to it, then report it ``lost``."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Quiescent:
    """The round is over: no call is under way anywhere. Enter the next."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The last round is over: send what is still queued, and leave."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The timeout has passed; ``reason`` says who has not entered shutdown and who is still busy."""

    reason: str


Action = Send | CutOff | Quiescent | Leave | Failed


class Termination:
    """One worker's part. Every method returns what is to be done; for one thread.

    Args:
        me: this worker.
        members: all workers of the group, this one included.
        rounds: how many times everybody enters before everybody leaves.

    Example::

        termination = Termination(me, group.members)
        for action in termination.enter(now, report, timeout=30):
            match action:
                case Send(peer, message): ...
    """

    def __init__(self, me: Member, members: Iterable[Member], rounds: int = 1) -> None:
        self._me: Peer = me.incarnation
        self._members = {member.incarnation: member for member in members}
        self._alive = set(self._members)
        self._rounds = rounds
        self._round = 0
        self._entered: list[set[Peer]] = [set() for _ in range(rounds)]
        self._over = False
        self._deadline: float | None = None
        self._answer_by: float | None = None
        # Whom we have to tell once we are clean, and whom it holds dead: it probed us when we were not.
        self._owes: tuple[Peer, frozenset[Peer]] | None = None
        # As leader.
        self._wave = 0
        self._reports: dict[Peer, tuple[frozenset[Peer], Report]] | None = None
        self._proof: dict[Peer, tuple[frozenset[Peer], Report]] | None = None
        self._busy: dict[Peer, int] = {}
        self._wanted = False
        self._not_before = 0.0
        self._pause = _FIRST_PAUSE
        self._actions: list[Action] = []

    # What a shell asks.

    @property
    def leader(self) -> Peer:
        """The living worker of the lowest rank."""
        return min(self._alive, key=lambda peer: self._members[peer].id)

    @property
    def is_over(self) -> bool:
        """Whether it has said ``Leave`` or ``Failed``."""
        return self._over

    @property
    def next_tick(self) -> float | None:
        """When ``tick`` is due, on the clock of ``now``; None if it is not."""
        if self._over:
            return None
        times = [time for time in (self._deadline, self._answer_by) if time is not None]
        if self._leads and self._wanted and self._reports is None and self._all_entered:
            times.append(self._not_before)
        return min(times, default=None)

    @property
    def awaits_idleness(self) -> bool:
        """Whether it makes a difference, now, to be told that this worker became idle."""
        if self._over or not self._has_entered:
            return False
        return self._all_entered if self._leads else self._owes is not None

    # What happens.

    def enter(self, now: float, report: Report, timeout: float = 0.0) -> list[Action]:
        """This worker enters shutdown, or the next round of it.

        Args:
            now: a monotonic clock, in seconds.
            report: on this worker, as of now; likewise in the other methods.
            timeout: seconds until ``Failed``; 0 for never.
        """
        if self._over or self._has_entered:
            return []
        self._deadline = now + timeout if timeout > 0 else None
        self._entered[self._round].add(self._me)
        self._announce()
        return self._go_on(now, report)

    def became_idle(self, now: float, report: Report) -> list[Action]:
        """Nothing is under way here any more. May be called whenever that may be so."""
        if not self._over:
            self._tell_if_clean(report)
        return self._go_on(now, report)

    def lost(self, peer: Peer, now: float, report: Report) -> list[Action]:
        """A peer is gone, for whatever reason, and nothing that it has sent will be received any more."""
        if self._over or peer not in self._alive or peer == self._me:
            return []
        followed = self.leader
        self._alive.discard(peer)
        for entered in self._entered:
            entered.discard(peer)
        self._reports = self._proof = None  # a wave in progress is void
        self._busy.pop(peer, None)
        self._wanted = True
        if self._owes is not None and self._owes[0] == peer:
            self._owes = None
        if peer == followed:
            if self._has_entered:
                self._announce()
            if self._answer_by is not None:
                self._ask(now)
        self._tell_if_clean(report)
        return self._go_on(now, report)

    def receive(self, sender: Peer, message: Any, now: float, report: Report) -> list[Action]:
        """A message of a peer's termination.

        Raises:
            ProtocolError: it is none.
        """
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
            return self._go_on(now, report)
        while number > self._round and not self._over and self._has_entered:
            self._finish_round()
        if self._over or number != self._round:
            return self._go_on(now, report)
        try:
            self._take(sender, kind, details, now, report)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a malformed shutdown message: {kind} {str(details)[:100]}") from error
        return self._go_on(now, report)

    def tick(self, now: float, report: Report) -> list[Action]:
        """The time that ``next_tick`` named has come. Earlier or later does no harm."""
        if self._over:
            return []
        if self._answer_by is not None and now >= self._answer_by:
            self._fail(f"{self._name(self.leader)}, who leads it, does not answer")
        elif self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._ask(now)
        return self._go_on(now, report)

    # The worker.

    @property
    def _has_entered(self) -> bool:
        return self._round < self._rounds and self._me in self._entered[self._round]

    def _announce(self) -> None:
        if not self._leads:
            self._send(self.leader, "entered")
        self._wanted = True

    def _ask(self, now: float) -> None:
        """The timeout has passed: find out what for."""
        if self._leads:
            self._fail(self._standing(self._alive - self._entered[self._round], self._busy))
        else:
            self._answer_by = now + _ANSWER_SECONDS
            self._send(self.leader, "ask")

    def _take(self, sender: Peer, kind: str, details: list[Any], now: float, report: Report) -> None:
        match kind, details:
            case "entered", []:
                self._entered[self._round].add(sender)
                self._wanted = True
            case "idle", []:
                self._wanted = True
            case "probe", [int(wave), list(dead)]:
                self._answer(sender, wave, frozenset(dead), report)
            case "report", [int(wave), list(lost), int(active), sent, received]:
                if self._reports is not None and wave == self._wave:
                    self._reports[sender] = frozenset(lost), Report(active, dict(sent), dict(received))
            case "quiescent", []:
                if self._has_entered:
                    self._finish_round()
            case "ask", []:
                missing = sorted(self._alive - self._entered[self._round])
                self._send(sender, "status", missing, [[peer, count] for peer, count in self._busy.items()])
            case "status", [list(missing), busy]:
                if self._answer_by is not None:
                    self._fail(self._standing(missing, dict(busy)))
            case _:
                raise ProtocolError(f"not a shutdown message: {kind} {str(details)[:100]}")

    def _answer(self, leader: Peer, wave: int, dead: frozenset[Peer], report: Report) -> None:
        unfenced = dead & self._alive - {self._me}
        self._actions.extend(CutOff(peer) for peer in sorted(unfenced))
        if unfenced or report.active:
            self._owes = leader, dead
        sent, received = map(list, report.sent.items()), map(list, report.received.items())
        self._send(leader, "report", wave, sorted(self._lost), report.active, list(sent), list(received))

    def _tell_if_clean(self, report: Report) -> None:
        """Who was not clean when it was probed says so once it is."""
        if report.active:
            return
        if self._leads:
            self._wanted = True
        if self._owes is not None and not self._owes[1] & self._alive - {self._me}:
            self._send(self._owes[0], "idle")
            self._owes = None

    def _finish_round(self) -> None:
        # Who has announced itself here waits for us to say so, also if we have it from another ourselves:
        # the leader died when it had told some.
        listeners = self._alive if self._leads else self._entered[self._round]
        for peer in sorted(listeners - {self._me}):
            self._send(peer, "quiescent")
        self._round += 1
        self._deadline = self._answer_by = self._owes = None
        self._reports = self._proof = None
        self._busy = {}
        self._wanted = True
        self._pause = _FIRST_PAUSE
        self._not_before = 0.0
        self._over = self._round == self._rounds
        self._actions.append(Leave() if self._over else Quiescent())

    # The leader.

    @property
    def _lost(self) -> frozenset[Peer]:
        return frozenset(self._members.keys() - self._alive)

    @property
    def _leads(self) -> bool:
        return self.leader == self._me

    @property
    def _all_entered(self) -> bool:
        return self._round < self._rounds and self._alive <= self._entered[self._round]

    def _go_on(self, now: float, report: Report) -> list[Action]:
        """Do what a leader can do now, and hand over all actions."""
        while not self._over and self._leads and self._all_entered:
            if self._reports is None:
                if not self._wanted or now < self._not_before:
                    break
                self._start_wave(report)
            if not self._alive <= self._reports.keys():  # type: ignore[union-attr]
                break
            self._judge_wave(now)
        actions, self._actions = self._actions, []
        return actions

    def _start_wave(self, report: Report) -> None:
        self._wanted = False
        self._wave += 1
        self._reports = {self._me: (self._lost, report)}
        for peer in sorted(self._alive - {self._me}):
            self._send(peer, "probe", self._wave, sorted(self._lost))

    def _judge_wave(self, now: float) -> None:
        assert self._reports is not None
        reports, self._reports = self._reports, None
        self._busy = {peer: report.active for peer, (_, report) in reports.items() if report.active}
        clean = not self._busy and all(self._lost <= lost for lost, _ in reports.values())
        if clean and is_balanced(reports):
            if reports == self._proof:
                self._finish_round()
                return
            self._proof, self._wanted, self._not_before = reports, True, now
            return
        self._proof = None
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if clean:
            self._wanted = True  # something is on its way, and nobody will tell when it has arrived

    # Words.

    def _send(self, peer: Peer, kind: str, *details: Any, round_number: int | None = None) -> None:
        number = self._round if round_number is None else round_number
        self._actions.append(Send(peer, [number, kind, *details]))

    def _fail(self, why: str) -> None:
        self._over = True
        self._actions.append(Failed(f"shutdown timed out: {why}"))

    def _standing(self, missing: Collection[Peer], busy: Mapping[Peer, int]) -> str:
        """What the round waits for."""
        by_rank = sorted(self._members, key=lambda peer: self._members[peer].id)
        absent = [self._name(peer) for peer in by_rank if peer in missing]
        working = [f"{self._name(peer)} ({busy[peer]} under way)" for peer in by_rank if peer in busy]
        parts = [f"not in shutdown: {', '.join(absent)}"] if absent else []
        parts += [f"still busy: {', '.join(working)}"] if working else []
        return "; ".join(parts) or "messages are still on their way"

    def _name(self, peer: Peer) -> str:
        return f"worker '{self._members[peer].name}'"
