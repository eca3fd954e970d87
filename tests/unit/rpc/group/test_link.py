"""The life of a connection between two workers: a table that is complete, and ends."""

from __future__ import annotations

import itertools

import pytest

from rpc.group.link import CONNECTING, TRANSITIONS, GiveUp, Link, LinkEvent, LinkState

ENDS = {LinkState.LEFT, LinkState.LOST}


def test_every_state_is_reached_and_has_a_row() -> None:
    assert set(TRANSITIONS) == set(LinkState)
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(LinkState) - {
        LinkState.UNCONNECTED
    }


@pytest.mark.parametrize("state", LinkState)
def test_a_worker_may_leave_or_be_lost_at_any_time_but_only_once(state: LinkState) -> None:
    ends = {TRANSITIONS[state].get(event) for event in (LinkEvent.LEAVE, LinkEvent.LOSE)}
    assert ends == ({None} if state in ENDS else ENDS)


def happens(link: Link, event: LinkEvent) -> bool:
    """Report an event to a link; returns whether it makes a difference."""
    match event:
        case LinkEvent.DIAL:
            return link.dial()
        case LinkEvent.REACH:
            return link.reach(None)
        case LinkEvent.WELCOME:
            return link.welcome(0.0)
        case LinkEvent.CROSS:
            return link.cross()
        case LinkEvent.ACCEPT:
            return link.accept(0.0)
        case LinkEvent.BREAK:
            return link.broke("cut", 0.0, 30.0, progressed=True) is not None
        case LinkEvent.LEAVE:
            return link.leave()
        case LinkEvent.LOSE:
            return link.lose()


def test_whatever_happens_there_is_one_attempt_and_one_connection() -> None:
    """Of four events in any order: one attempt and one connection between breaks, nothing after the end."""
    for events in itertools.product(LinkEvent, repeat=4):
        link = Link()
        passed = [link.state]
        for event in events:
            before = link.state
            assert happens(link, event) is (event in TRANSITIONS[before])
            passed += [link.state] if link.state is not before else []
        breaks = passed.count(LinkState.BROKEN)
        assert all(passed.count(state) <= 1 + breaks for state in LinkState)
        assert not ENDS & set(passed[:-1])
        if LinkState.ESTABLISHED in passed:
            following = passed[passed.index(LinkState.ESTABLISHED) :]
            assert not CONNECTING & set(following) or LinkState.BROKEN in following


def test_a_connection_that_does_not_tell_the_process_leaves_the_known_one() -> None:
    link = Link()
    link.accept(0.0, 4711)
    link.broke("cut", 1.0, 30.0, progressed=True)
    link.accept(2.0)
    assert link.process == 4711


def test_attempts_fail_with_growing_pauses_until_patience_is_over() -> None:
    link, now, pauses = Link(), 0.0, []
    while True:
        assert link.dial()
        verdict = link.failed("no route", now, patience=1.0)
        if isinstance(verdict, GiveUp):
            break
        assert verdict is not None
        pauses.append(verdict)
        now += verdict
    assert verdict.reason == "no route for 1 s"
    assert pauses == sorted(pauses)
    assert 1.0 <= sum(pauses) < 1.3


def test_a_worker_whose_address_refuses_is_given_up_at_once() -> None:
    link = Link()
    assert link.dial()
    assert link.failed("refused", 0.0, patience=30.0, may_live=False) == GiveUp("refused")


def test_a_connection_that_carried_something_is_made_again_at_once_however_often() -> None:
    link = Link()
    for now in range(100):
        assert link.accept(float(now))
        assert link.broke("reset", float(now), patience=30.0, progressed=True) == 0.0


def test_no_attempt_is_made_during_a_pause() -> None:
    link = Link()
    link.pause()
    assert not link.dial()
    link.resume()
    assert link.dial()


def test_connections_that_break_at_once_are_made_again_after_growing_pauses_and_not_for_ever() -> None:
    link, now, pauses = Link(), 100.0, []
    while True:
        assert link.accept(now)
        verdict = link.broke("cut", now, patience=30.0, progressed=False)
        if isinstance(verdict, GiveUp):
            break
        assert verdict is not None
        pauses.append(verdict)
        now += verdict
    assert pauses[:5] == [0.0, 0.005, 0.01, 0.02, 0.04]
    assert max(pauses) == 2.0
    assert 28 < sum(pauses) < 33
    assert "as soon as it was connected" in verdict.reason
