"""The life of a connection between two workers: a table that is complete, and ends."""

from __future__ import annotations

import itertools

import pytest

from rpc.group.connection_state import CONNECTING, TRANSITIONS, Event, State
from tests.support.members import peer

ENDS = {State.LEFT, State.LOST}


def test_every_state_is_reached_and_has_a_row() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(State) - {
        State.UNCONNECTED
    }


@pytest.mark.parametrize("state", State)
def test_a_worker_may_leave_or_be_lost_at_any_time_but_only_once(state: State) -> None:
    ends = {TRANSITIONS[state].get(event) for event in (Event.LEAVE, Event.LOSE)}
    assert ends == ({None} if state in ENDS else ENDS)


def test_whatever_happens_there_is_one_attempt_and_one_connection() -> None:
    """Of four events in any order: one attempt and one connection between breaks, nothing after the end."""
    for events in itertools.product(Event, repeat=4):
        there = peer()
        passed = [there.state]
        for event in events:
            before = there.state
            assert there.step(event) is (event in TRANSITIONS[before])
            passed += [there.state] if there.state is not before else []
        breaks = passed.count(State.BROKEN)
        assert all(passed.count(state) <= 1 + breaks for state in State)
        assert not ENDS & set(passed[:-1])
        if State.ESTABLISHED in passed:
            following = passed[passed.index(State.ESTABLISHED) :]
            assert not CONNECTING & set(following) or State.BROKEN in following
