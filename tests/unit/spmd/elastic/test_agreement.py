"""Simulated runs of jobs, and what these meet too rarely: see ``NOTICED`` for the rules that they prove."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from spmd.elastic.agreement import (
    NEW,
    Ballot,
    Installation,
    Member,
    Outcome,
    OutdatedError,
    Proposal,
    Report,
    View,
    may_go_on,
)
from tests.simulation.elastic import find, run
from tests.simulation.elastic_breakages import BREAKAGES

NOTICED = {
    "one prepared member is enough": 8,
    "an outdated ballot decides": 208,
    "half is enough": 36,
    "a removal counts for less than half": 230,
    "a frozen member counts votes": 82,
    "attempts are no bases": 3,
    "newcomers are not bound by attempts": 888,
    "a death is certain without contact": 353,
    "only members are witnesses": 353,
    "a stopped worker is certain of deaths": 230,
    "a broken replica takes part": 6,
    "only one worker founds the job": 11,
    "workers that leave are not cut off": 322,
    "every loss is a certain death": 322,
}
"""Rules that are left out, and a seed of the simulation that notices it."""


def form(members: Sequence[Member], *, completed_by: Sequence[Member] | None = None) -> Installation:
    """Have the first member propose a view of all, which the others, or some of them, complete."""
    proposal = Proposal(members[0], [each.me for each in members])
    for each in members:
        proposal.take(each.freeze(proposal.ballot))
    plan = proposal.plan()
    assert plan.may_go_on
    reports = [each.install(proposal.ballot, plan.members, plan.released) for each in members]
    done = [
        each.decide(proposal.ballot, plan.members, _ordered(plan.members, reports))
        for each in (members if completed_by is None else completed_by)
    ]
    return done[0]


def _ordered(members: Sequence[int], reports: Sequence[Report]) -> list[Report]:
    by_member = {each.member: each for each in reports}
    return [by_member[each] for each in members]


def job(size: int) -> tuple[list[Member], View]:
    """Members of a view that all have the state of step 0."""
    members = [Member(0, 0), *(Member(each) for each in range(1, size))]
    view = form(members).view
    for each in members[1:]:
        assert each.load(view, 0, None)
    return members, view


def commit(members: Sequence[Member], view: View, *, seen_by: Sequence[Member]) -> None:
    """Commit a step: all are prepared and vote; some have all votes."""
    assert all(each.prepare(view) for each in members)
    votes = [each.vote(grow=False) for each in members]
    assert all(each.count(view, votes) for each in seen_by)


def can_go_on(*members: Member) -> bool:
    return may_go_on([each.me for each in members], [each.report() for each in members])


def test_member_that_was_stopped_knows_of_no_death() -> None:
    (first, second), _ = job(2)
    first.was_stopped()
    first.witnessed(second.me)
    assert not can_go_on(first)


def test_newcomer_is_bound_by_a_view_that_it_has_tried() -> None:
    (first,), _ = job(1)
    newcomer, another = Member(7), Member(8)
    form([first, newcomer, another], completed_by=[first])
    assert not can_go_on(newcomer)
    assert can_go_on(newcomer, another)


def test_workers_that_are_left_out_are_cut_off_first_unless_they_have_promised_to_leave() -> None:
    (first, second, third), _ = job(3)
    assert first.to_cut_off([0, 1], [], []) == {third.me}
    assert first.to_cut_off([0, 1], [third.me], []) == set()
    form([first, second])
    first.freeze((10, 0))
    with pytest.raises(OutdatedError):
        first.install((10, 0), [0, 1, 2], [])
    assert second.excluded == {third.me}


def replicas(count: int) -> tuple[list[Member], View]:
    """Members of a view of replicas of two workers; all have the state of step 0."""
    members = [Member(each, NEW, (each - each % 2, each - each % 2 + 1)) for each in range(2 * count)]
    members[0].found()
    view = form(members).view
    assert view.newcomers == frozenset(range(2, 2 * count))
    assert [each.step for each in members[:2]] == [0, 0]  # the whole replica has founded the job
    for each in members[2:]:
        assert each.load(view, 0, None)
    return members, view


def proposed(proposer: Member, *others: Member) -> Proposal:
    proposal = Proposal(proposer, [])
    for each in (proposer, *others):
        proposal.take(each.freeze(proposal.ballot))
    assert not proposal.to_ask({*range(4)} - proposal.reports.keys())
    return proposal


def resign(member: Member, proposal: Proposal) -> Outcome:
    outcome = member.resign(proposal.ballot, list(proposal.reports.values()))
    proposal.take(member.report())
    return outcome


def test_worker_of_a_broken_replica_resigns_before_the_whole_ones_go_on() -> None:
    (first, second, third, fourth), view = replicas(2)
    assert (view.size, view.rank(third.me), view.counterparts(third.me)) == (2, 1, (0, 2))
    for each in (first, second, third):
        each.witnessed(fourth.me)
    proposal = proposed(first, second, third)
    plan = proposal.plan()
    assert (plan.members, plan.broken, plan.may_go_on) == ((0, 1), frozenset({third.me}), True)
    assert resign(third, proposal) is Outcome.ABORT
    assert (third.left, third.missing) == (True, {fourth.me})
    plan = proposal.plan()
    assert (plan.members, plan.broken, plan.released) == ((0, 1), frozenset(), frozenset({third.me}))


def test_worker_of_a_broken_replica_is_kept_while_the_whole_ones_may_not_go_on() -> None:
    (first, second, third, _), _ = replicas(2)
    plan = proposed(first, second, third).plan()  # the fourth worker may live
    assert (plan.broken, plan.may_go_on, plan.is_lost) == (frozenset({third.me}), False, False)


def test_worker_that_resigns_commits_a_step_that_another_one_has_committed() -> None:
    members, view = replicas(2)
    first, second, third, fourth = members
    fourth.leaving = True
    commit(members, view, seen_by=[fourth, first])
    assert fourth.left
    proposal = proposed(first, second, third, fourth)
    assert proposal.plan().broken == {third.me}
    assert resign(third, proposal) is Outcome.COMMIT
    assert (third.step, third.missing) == (1, set())  # it leaves, since its replica does


def test_state_is_lost_if_no_replica_that_has_it_is_whole() -> None:
    (first, second, third, fourth), _ = replicas(2)
    for each in (first, third):
        each.witnessed(second.me)
        each.witnessed(fourth.me)
    plan = proposed(first, third).plan()
    assert (plan.members, plan.may_go_on, plan.is_lost) == ((), False, True)


def test_state_is_not_lost_while_other_workers_may_have_gone_on_with_it() -> None:
    (first, _, third, _), _ = replicas(2)
    assert not proposed(first, third).plan().is_lost


def test_replica_without_the_state_of_all_its_workers_observes() -> None:
    (first, second, third, fourth), _ = replicas(2)
    fourth.step = NEW
    view = form([first, second, third, fourth]).view
    assert view.newcomers == {third.me, fourth.me}
    for each in (third, fourth):
        each.witnessed(first.me)
        each.witnessed(second.me)
    assert form([third, fourth]).outcome is Outcome.LOST


def test_member_that_decides_to_leave_after_its_report_still_takes_part_in_the_view() -> None:
    (first, second), _ = job(2)
    proposal = Proposal(first, [])
    for each in (first, second):
        proposal.take(each.freeze(proposal.ballot))
    second.departing = True
    plan = proposal.plan()
    reports = [each.install(proposal.ballot, plan.members, plan.released) for each in (first, second)]
    assert second.decide(proposal.ballot, plan.members, reports).view.members == (0, 1)
    assert second.is_due(lambda _: False)
    assert second.freeze((9, 0)).left


def test_earlier_ballot_is_refused() -> None:
    member = Member(0, 0)
    later: Ballot = (5, 1)
    member.freeze(later)
    with pytest.raises(OutdatedError):
        member.freeze((4, 9))
    with pytest.raises(OutdatedError):
        member.install((4, 9), [0], [])


def test_newcomers_without_anyone_that_has_the_state_learn_that_it_is_lost() -> None:
    first, newcomer, another = Member(0, 0), Member(1), Member(2)
    form([first, newcomer, another])
    for each in (newcomer, another):
        each.witnessed(first.me)
    assert form([newcomer, another]).outcome is Outcome.LOST
    assert newcomer.step == NEW


def test_vote_to_finish_ends_the_job_for_those_that_have_not_seen_it() -> None:
    (first, second), view = job(2)
    first.finishing = True
    commit([first, second], view, seen_by=[second])
    form([first, second])
    assert (first.ended, second.ended) == (True, True)
    assert first.step == second.step == 1


def test_member_that_stays_learns_from_those_that_leave_that_the_job_has_ended() -> None:
    (first, second), view = job(2)
    first.finishing = True
    commit([first, second], view, seen_by=[first])
    first.left = True
    proposal = Proposal(second, [])
    reports = [each.freeze(proposal.ballot) for each in (first, second)]
    for each in reports:
        proposal.take(each)
    plan = proposal.plan()
    second.install(proposal.ballot, plan.members, plan.released)
    assert second.decide(proposal.ballot, plan.members, reports).outcome is Outcome.COMMIT
    assert (second.step, second.ended) == (1, True)


@pytest.mark.parametrize("seeds", [range(20), range(1000, 1020), NOTICED.values()])
def test_simulated_jobs_keep_their_promises(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize(("breakage", "seed"), NOTICED.items())
def test_simulation_notices_a_rule_that_is_left_out(
    breakage: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, broken = BREAKAGES[breakage]
    monkeypatch.setattr(owner, attribute, broken)
    assert find([seed]) == seed
