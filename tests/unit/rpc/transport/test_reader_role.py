"""The role of a connection's reader: one at a time, and every step may be repeated."""

from __future__ import annotations

import threading

import pytest

from rpc.transport.inline_read.role import LOOP, ReaderRole, Turn


@pytest.fixture
def role() -> ReaderRole:
    return ReaderRole()


def my_turn() -> Turn:
    return Turn(threading.get_ident(), stands_by=False)


def test_one_at_a_time_has_the_role(role: ReaderRole) -> None:
    first, second = my_turn(), my_turn()
    assert role.take(first)
    assert not role.take(second)
    assert not role.take(LOOP)
    assert role.holder() is first
    role.leave(first)
    assert role.holder() is None
    assert role.take(LOOP)


def test_taking_it_twice_is_taking_it(role: ReaderRole) -> None:
    turn = my_turn()
    assert role.take(turn)
    assert role.take(turn)


def test_nobody_ends_the_turn_of_another(role: ReaderRole) -> None:
    turn = my_turn()
    role.take(turn)
    role.leave(my_turn())
    role.leave(LOOP)
    assert role.holder() is turn


def test_a_thread_finds_its_own_turn_and_no_other(role: ReaderRole) -> None:
    assert role.own_turn() is None
    turn = my_turn()
    role.take(turn)
    assert role.own_turn() is turn
    role.leave(turn)
    role.take(Turn(threading.get_ident() + 1, stands_by=False))
    assert role.own_turn() is None
    assert ReaderRole().own_turn() is None


def test_the_loop_takes_the_role_over_once(role: ReaderRole) -> None:
    turn = my_turn()
    role.take(turn)
    assert role.pass_to_loop(turn)
    assert role.holder() is LOOP
    assert not role.pass_to_loop(turn)
    role.leave(turn)
    assert role.holder() is LOOP


def test_a_request_to_take_over_that_comes_late_does_not_end_a_later_turn(role: ReaderRole) -> None:
    earlier, later = my_turn(), my_turn()
    role.take(earlier)
    role.leave(earlier)
    role.take(later)
    assert not role.pass_to_loop(earlier)
    assert role.holder() is later
