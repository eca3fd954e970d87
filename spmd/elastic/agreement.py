"""How the members of an elastic job agree: pure decisions, without I/O, clocks or threads.

*Concepts.* A *view* is an ordered list of members, incarnations of workers, that train together. An *attempt*
is one try at a step in one view; it ends committed or aborted, alike on all members that go on. The *state*
(model, optimizer) changes only when a step is committed, so after n steps it is bitwise equal on all members.

*Votes.* A member whose gradients are reduced is *prepared*, and sends its vote to all members of the view. A
member that has all votes commits the step. No message but this one is needed while nobody is lost.

*View changes.* Any member may propose the next view; usually the first living member of the view does. A
*ballot* numbers its proposal. (1) Members are asked to freeze. A frozen member decides nothing by itself: its
report stays as it is, and it ignores lower ballots. (2) The proposer chooses the members of the next view and
asks them to install it. They exchange their reports, all to all, and each decides by the same function,
``Member.decide``. Let S be the highest number of committed steps among them:

- a member at S - 1 is prepared for that step in the view that committed it, and commits it now;
- if all members with a state are at S and are prepared for it, all commit it;
- otherwise the attempt is aborted, and step S is repeated.

If anything fails, another ballot follows.

*Why that is safe.* A commit by votes needs all members of the view to be prepared, so a survivor that has not
seen all votes is prepared in the same attempt, and commits it in the exchange. A commit by exchange needs all
members of the new view; a member that did not complete that exchange gives the same report in the next one. A
member that completed it and aborted is no longer prepared, so no later exchange finds all prepared in that
attempt. Nor does one find members prepared in different views: all members of the later one had completed it
before anybody was prepared there, so a member prepared in the earlier one was not among them; then they, or
members before them, had gone on without it, and never meet it again ("One job, never two"). Hence members
differ by at most one step, and no state is ever copied between members that have one.

*One job, never two.* The *bases* of a member are the view that it completed last, and each one that it has
tried to form since, as others may have completed it. A set of members may go on if for each base of each of
them

1. it has more than half of the base's members; or
2. all the others are *gone for certain*: they have promised to leave, or have ended, as a witness with this
   base knows that was in contact with them until then (so they had not gone on without it before); or
3. it has exactly half of them, and each of the others is gone for certain or was removed from the group's log
   while a witness with this base was still in it. Of two halves only one can find this, since a removal is
   final.

The witnesses are the members of the set; or these and the workers that leave, which have promised to go on
with nobody: then each base of those is one more condition.

A member that takes part in a view without some members of its bases *excludes* them: they are cut off first,
and the member waits until they must have noticed (``Member.to_cut_off``). Members with this base that were
stopped for longer than that know of no death for certain (``Member.was_stopped``). Workers that leave are not
excluded, but are cut off with those that may live: with them they would be witnesses of the ends of members
that have gone on.

*Newcomers.* A newcomer is a member of the next view, and an observer of its first step: it contributes
nothing, loads the state, which is constant until it votes, and counts from the next step on. If all members
that had a state are gone, the state is lost, which the exchange shows to all.

*Replicas.* A replica is some workers that are lost as a whole, each at its *place* in it; often it is one
worker. A view consists of whole replicas, one after the other. A replica that lacks a worker is *broken*.
Once the whole ones may go on without the others of it, these are asked to resign, which is the promise to
leave; one that resigns commits its step if a report shows that another member has. A replica has the state
if all its workers have it, and gets it from the workers at the same places in another replica. All workers
of the replica that founds the job have the state of step 0.

*The end.* A member that leaves says so in its vote or its report, and its replica leaves with it. Its report
is a promise: it takes part in no view any more. A vote to finish ends the job on all members after the step
that it commits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, TypeAlias

__all__ = [
    "NEW",
    "Ballot",
    "Installation",
    "Member",
    "Outcome",
    "OutdatedError",
    "Plan",
    "Proposal",
    "Report",
    "View",
    "Vote",
    "may_go_on",
]

Ballot: TypeAlias = tuple[int, int]
"""A proposal's number: a count, and the incarnation of the proposer."""

NEW: Final = -1
"""The number of committed steps of a member that has no state yet."""


class OutdatedError(Exception):
    """A request belongs to a ballot that is over, or comes from a worker that was excluded."""


class Outcome(Enum):
    """How an attempt ends for a member."""

    COMMIT = "the step is committed on all members"
    ABORT = "the step is repeated"
    LOST = "no member that had the state is left"


@dataclass(frozen=True, slots=True)
class View:
    """An ordered list of members that train together.

    Attributes:
        number: counts the views of the job; for users.
        ballot: identifies the view.
        members: the incarnations, by rank.
        newcomers: those of them that observe the first step: whole replicas.
        first: the first step that is tried in it.
        replica_size: number of workers of a replica.
    """

    number: int
    ballot: Ballot
    members: tuple[int, ...]
    newcomers: frozenset[int]
    first: int
    replica_size: int = 1

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.members) // self.replica_size

    def rank(self, member: int) -> int:
        """Return the rank of a member's replica."""
        return self.members.index(member) // self.replica_size

    def contributors(self, step: int) -> list[int]:
        """Return the ranks of the replicas among which the batch of a step is cut."""
        firsts = self.members[:: self.replica_size]
        return [rank for rank, each in enumerate(firsts) if step > self.first or each not in self.newcomers]

    def counterparts(self, member: int) -> tuple[int, ...]:
        """Return the workers at a member's place in each replica, by rank."""
        return self.members[self.members.index(member) % self.replica_size :: self.replica_size]


@dataclass(frozen=True, slots=True)
class Vote:
    """A member's vote to commit a step.

    Attributes:
        step: the step.
        grow: whether newcomers wait.
        leave: whether the member leaves after the step.
        finish: whether the job ends after the step.
    """

    step: int
    grow: bool = False
    leave: bool = False
    finish: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a frozen member tells the others.

    Attributes:
        member: its incarnation.
        step: number of committed steps, or ``NEW``.
        prepared: the view in which it is prepared for this step, if it is.
        last: the view in which the last step was committed.
        view: the number of the last view that it has completed.
        bases: see the head of this module.
        dead: workers whose end it has witnessed.
        removed: workers that it has seen removed from the group's log.
        left: whether it takes part in no view any more.
        ended: whether it has seen a vote to finish.
        replica: the workers of its replica, by place.
        founder: whether it has founded the job.
    """

    member: int
    step: int
    prepared: Ballot | None
    last: Ballot | None
    view: int
    bases: tuple[frozenset[int], ...]
    dead: frozenset[int]
    removed: frozenset[int]
    left: bool
    ended: bool
    replica: tuple[int, ...]
    founder: bool


@dataclass(frozen=True, slots=True)
class Installation:
    """The outcome of an exchange of reports, for one member.

    Attributes:
        view: the next view.
        outcome: how the member's attempt has ended.
    """

    view: View
    outcome: Outcome


def may_go_on(members: Collection[int], reports: Iterable[Report]) -> bool:
    """Whether members may form a view: see "One job, never two" at the head of this module.

    Args:
        members: the members of the view.
        reports: their reports, and those of workers that leave.
    """
    reports = list(reports)
    within = [each for each in reports if each.member in members]
    left = {each.member for each in reports if each.left}
    return any(_may_go_on(members, witnesses, left) for witnesses in (within, reports))


def _may_go_on(members: Collection[int], witnesses: Iterable[Report], left: Collection[int]) -> bool:
    for base in {base for each in witnesses for base in each.bases}:
        present = len(base.intersection(members))
        if 2 * present > len(base):
            continue
        contacts = [each for each in witnesses if base in each.bases]
        absent = base.difference(members, left, *(each.dead for each in contacts))
        removed = frozenset[int]().union(*(each.removed for each in contacts))
        if absent and not (2 * present == len(base) and absent <= removed):
            return False
    return True


@dataclass
class Member:
    """One member's part of the protocol. For one thread at a time.

    Args:
        me: this worker's incarnation.
        step: number of committed steps; ``NEW`` without a state.
        replica: the workers of its replica, by place; this one alone by default.
    """

    me: int
    step: int = NEW
    replica: tuple[int, ...] = ()
    view: View | None = None
    ballot: Ballot = (0, 0)
    heard: int = 0
    frozen: bool = True
    hold: bool = False
    """Whether a view change follows before the next attempt."""
    prepared: Ballot | None = None
    last: Ballot | None = None
    leaving: bool = False
    """Whether it wants to leave after the next step."""
    departing: bool = False
    """Whether it wants to leave with its next report."""
    left: bool = False
    """Whether it takes part in no view any more."""
    founder: bool = False
    finishing: bool = False
    ended: bool = False
    missing: set[int] = field(default_factory=set)
    """Workers that its replica has lost, for which it has resigned."""
    dead: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)
    """Those of them that have promised to leave, and may still run."""
    removed: set[int] = field(default_factory=set)
    excluded: set[int] = field(default_factory=set)
    doubted: set[int] = field(default_factory=set)
    tried: list[frozenset[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replica = self.replica or (self.me,)
        self.founder = self.step != NEW

    def found(self) -> None:
        """Found the job."""
        self.step, self.founder = 0, True

    # ---- steps

    @property
    def may_begin(self) -> bool:
        """Whether this member may begin an attempt."""
        return self.view is not None and not (self.frozen or self.hold or self.departing)

    def prepare(self, view: View) -> bool:
        """Become prepared for the next step in a view, after its gradients were reduced there; false if the
        attempt is over.
        """
        if not self._is_in(view) or self.step == NEW:
            return False
        self.prepared = view.ballot
        return True

    def vote(self, *, grow: bool) -> Vote:
        """Return the vote of a prepared member."""
        return Vote(self.step, grow, self.leaving, self.finishing)

    def count(self, view: View, votes: Sequence[Vote]) -> bool:
        """Commit the step, given the votes of all members of the view; false if the view changes: then the
        exchange decides.
        """
        if not self._is_in(view) or self.prepared != view.ballot:
            return False
        self._commit(view.ballot)
        self.hold = any(vote.grow or vote.leave for vote in votes)
        self.left = any(votes[view.members.index(each)].leave for each in self.replica)
        self.ended = self.ended or any(vote.finish for vote in votes)
        return True

    def load(self, view: View, step: int, last: Ballot | None) -> bool:
        """Record that a newcomer has loaded the state of a step; false if it came too late."""
        if not self._is_in(view) or step != view.first:
            return False
        self.step, self.last = step, last
        return True

    def _is_in(self, view: View) -> bool:
        """Whether this member is in a view, and not frozen."""
        return self.view is not None and self.view.ballot == view.ballot and not self.frozen

    def _commit(self, ballot: Ballot) -> None:
        self.step, self.prepared, self.last = self.step + 1, None, ballot

    # ---- who is gone

    @property
    def bases(self) -> tuple[frozenset[int], ...]:
        completed = () if self.view is None else (frozenset(self.view.members),)
        return (*completed, *self.tried)

    def partners(self) -> set[int]:
        """Return the other members of this member's bases."""
        return {each for base in self.bases for each in base} - {self.me}

    def witnessed(self, incarnation: int) -> None:
        """Record that a worker has ended, for certain, and was in contact with this one until then."""
        if incarnation not in self.doubted:
            self.dead.add(incarnation)

    def was_stopped(self) -> None:
        """Record that this process did not run for a while: the workers that have ended may have excluded it
        before.
        """
        self.doubted |= self.partners()

    def was_removed(self, incarnations: Iterable[int]) -> None:
        """Record workers that are not in the group's log, read before this member was found in it."""
        self.removed.update(incarnations)

    # ---- view changes

    def proposer(self, is_lost: Callable[[int], bool]) -> int | None:
        """Return the member that proposes the next view, as far as this one knows; None before the first."""
        if self.view is None and not self.tried and self.step == NEW:
            return None
        order: Sequence[int] = sorted(self.partners() | {self.me}) if self.view is None else self.view.members
        return next((each for each in order if not is_lost(each)), None)

    def is_due(self, is_lost: Callable[[int], bool]) -> bool:
        """Whether a view change is needed, as far as this member knows."""
        if self.view is None and not self.tried and self.step == NEW:
            return False  # it has not begun
        wants = self.left or self.departing
        return self.frozen or self.hold or wants or any(map(is_lost, self.partners()))

    def next_ballot(self) -> Ballot:
        """Return a number for a proposal of this member."""
        return max(self.ballot[0], self.heard) + 1, self.me

    def outbid(self, ballot: Ballot) -> None:
        """Record that there is a later ballot than this member's proposal."""
        self.heard = max(self.heard, ballot[0])

    def freeze(self, ballot: Ballot) -> Report:
        """Decide nothing any more by oneself; returns the report.

        Raises:
            OutdatedError: there is a later ballot.
        """
        if ballot < self.ballot:
            raise OutdatedError(f"ballot {ballot} is older than {self.ballot}")
        self.ballot, self.frozen = ballot, True
        self.left = self.left or self.departing
        return self.report()

    def report(self) -> Report:
        """Return what the others need to know."""
        view = 0 if self.view is None else self.view.number
        return Report(
            self.me, self.step, self.prepared, self.last, view, self.bases, frozenset(self.dead),
            frozenset(self.removed), self.left, self.ended, self.replica, self.founder,
        )  # fmt: skip

    def resign(self, ballot: Ballot, reports: Sequence[Report]) -> Outcome:
        """Promise to leave, as a worker of a replica that is not whole; returns how the attempt has ended.

        Args:
            ballot: the proposal.
            reports: the reports of all that the proposer has asked.

        Raises:
            OutdatedError: a later ballot has begun.
        """
        if ballot != self.ballot or not self.frozen:
            raise OutdatedError(f"ballot {ballot} is over: {self.ballot} has begun")
        self.left = True
        self.missing.update(set(self.replica) - {each.member for each in reports})
        if self.prepared is None or not any(
            each.step == self.step + 1 and each.last == self.prepared for each in reports
        ):
            return Outcome.ABORT
        self._commit(self.prepared)
        return Outcome.COMMIT

    def to_cut_off(
        self, members: Collection[int], released: Collection[int], reports: Iterable[Report]
    ) -> set[int]:
        """Return the workers that ``install`` will exclude, and that may live and not know it yet; and with
        them those that leave, which could otherwise tell them of the ends of members.

        Args:
            members: the members of the view.
            released: workers that have promised to leave.
            reports: all that the proposer has, which tell who is dead.
        """
        promised = self.promised.union(released)
        others = self.partners() - set(members)
        may_live = others - promised - self.dead
        if may_live <= frozenset[int]().union(*(each.dead for each in reports)):
            return may_live
        return others - (self.dead - promised)

    def install(self, ballot: Ballot, members: Collection[int], released: Collection[int]) -> Report:
        """Take part in the forming of a view; returns the report for the exchange.

        Args:
            ballot: the proposal.
            members: the members of the view.
            released: workers that have promised to leave.

        Raises:
            OutdatedError: the ballot is over, or a member was excluded.
        """
        if ballot != self.ballot or not self.frozen:
            raise OutdatedError(f"ballot {ballot} is over: {self.ballot} has begun")
        if self.left:
            raise OutdatedError("this worker leaves")
        if barred := self.excluded.intersection(members):
            raise OutdatedError(f"{barred} were excluded")
        self.doubted |= self.partners() - set(members) - set(released) - self.dead
        self.dead.update(released)
        self.promised.update(released)
        self.excluded |= self.partners() - set(members)
        base = frozenset(members)
        if base not in self.tried:
            self.tried.append(base)
        return self.report()

    def decide(self, ballot: Ballot, members: Sequence[int], reports: Sequence[Report]) -> Installation:
        """Complete a view, given the reports of all its members, and of workers that leave.

        Raises:
            OutdatedError: a later ballot has begun.
        """
        if ballot != self.ballot or not self.frozen:
            raise OutdatedError(f"ballot {ballot} is over: {self.ballot} has begun")
        ended = any(each.ended for each in reports)
        reports = [each for each in reports if each.member in members]
        founding = {each for report in reports if report.founder for each in report.replica}
        reports = [_founding(each) if each.member in founding else each for each in reports]
        if self.me in founding:
            self.step = max(self.step, 0)
        step, _ = _agreed(reports)
        newcomers = frozenset(each for report in reports if report.step == NEW for each in report.replica)
        number = 1 + max(each.view for each in reports)
        outcome = Outcome.ABORT
        if newcomers.issuperset(members):
            outcome, step = Outcome.LOST, self.step
        elif NEW < self.step < step:
            assert self.prepared is not None
            self._commit(self.prepared)
            outcome = Outcome.COMMIT
        assert self.step in (NEW, step), (self.step, step)
        self.view = View(number, ballot, tuple(members), newcomers, step, len(self.replica))
        self.tried, self.prepared = [], None
        self.doubted -= set(members)
        self.frozen = self.hold = False
        self.ended = self.ended or ended
        return Installation(self.view, outcome)


def _founding(report: Report) -> Report:
    """Return the report of a worker whose replica founds the job."""
    return replace(report, step=max(report.step, 0))


def _agreed(reports: Sequence[Report]) -> tuple[int, bool]:
    """Return the number of committed steps of a new view, and whether the job has ended."""
    old = [each for each in reports if each.step != NEW]
    if not old:
        return NEW, False
    top = max(each.step for each in old)
    done = {each.last for each in old if each.step == top}
    for each in old:
        assert each.step == top or (each.step == top - 1 and done == {each.prepared}), reports
    if all(each.step == top and each.prepared is not None for each in old):
        assert len({each.prepared for each in old}) == 1, reports
        top += 1
    return top, any(each.ended for each in old)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a proposer does with the reports that it has.

    Attributes:
        members: the members of the next view, by rank; empty if there is none.
        released: workers that leave.
        broken: workers of replicas that are not whole; they must resign first.
        may_go_on: whether the members may form a view.
        is_lost: whether nobody may go on, here or elsewhere, since no whole replica has the state.
    """

    members: tuple[int, ...]
    released: frozenset[int]
    broken: frozenset[int]
    may_go_on: bool
    is_lost: bool


class Proposal:
    """One ballot, at its proposer.

    Args:
        member: the proposer.
        newcomers: workers that want to join, in the order in which they came.

    Attributes:
        ballot: its number.
        reports: the reports so far, by member.
    """

    def __init__(self, member: Member, newcomers: Sequence[int]) -> None:
        self.ballot = member.next_ballot()
        self._partners = member.partners() | {member.me}
        self._order = [] if member.view is None else [*member.view.members]
        self._newcomers = newcomers
        self.reports: dict[int, Report] = {}

    def to_ask(self, lost: Collection[int]) -> set[int]:
        """Return the workers whose reports are missing, except lost ones."""
        known = self._partners.union(
            *(base for each in self.reports.values() for base in (*each.bases, each.replica))
        )
        return (known | set(self._newcomers)) - set(lost) - set(self.reports)

    def take(self, report: Report) -> None:
        """Take in a report."""
        self.reports[report.member] = report

    def plan(self) -> Plan:
        """Return what to do with the reports, once none is missing."""
        reports = self.reports
        released = frozenset(each.member for each in reports.values() if each.left)
        order = dict.fromkeys((*self._order, *sorted(self._partners), *self._newcomers, *sorted(reports)))
        staying = [each for each in order if each in reports and each not in released]
        replicas = dict.fromkeys(reports[each].replica for each in staying)
        # Ranks of replicas stay in their order; those without a state come last.
        whole = sorted((each for each in replicas if set(each) <= set(staying)), key=self._is_new)
        members = tuple(each for replica in whole for each in replica)
        broken = frozenset(staying).difference(members)
        leaving = [replace(each, left=each.left or each.member in broken) for each in reports.values()]
        if members or not broken:
            is_lost = all(map(self._is_new, whole)) and self._has_lost_state(staying)
            return Plan(members, released, broken, may_go_on(members, leaving), is_lost)
        # The last replicas end. If they leave, the job has ended; otherwise its state is lost.
        is_lost, is_valid = self._has_lost_state(staying), may_go_on(staying, reports.values())
        return Plan(members, released, broken, is_valid and not is_lost, is_lost)

    def _has_lost_state(self, staying: Sequence[int]) -> bool:
        """Whether each replica with a state lacks a worker, and no other workers can go on."""
        reports = self.reports
        replicas = [each.replica for each in reports.values() if each.step != NEW]
        is_lost = bool(replicas) and not any(reports.keys() >= set(each) for each in replicas)
        return is_lost and may_go_on(staying, reports.values())

    def _is_new(self, replica: Sequence[int]) -> bool:
        """Whether a replica has no state."""
        reports = [self.reports[each] for each in replica]
        return any(each.step == NEW for each in reports) and not any(each.founder for each in reports)
