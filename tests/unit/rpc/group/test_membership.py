"""Membership: names and ids lead to workers, and a worker that is gone stays gone."""

from __future__ import annotations

import pytest

from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.group.membership import Membership
from rpc.group.workers import Member, WorkerInfo
from tests.support.members import member

ME = member("me", 0)
FIRST, SECOND = member("first", 1), member("second", 2)


def view(*others: Member, static: bool = False) -> Membership:
    made = Membership(ME, static=static)
    for other in others:
        assert made.join(other)
    return made


def test_a_misspelled_callee_is_told_what_was_probably_meant_and_few_of_the_others() -> None:
    group = view(*(member(f"trainer{rank}", rank) for rank in range(1, 20)))
    with pytest.raises(UnknownWorkerError, match=r"Did you mean 'trainer7'\? .* and 12 more\.$"):
        group.resolve("trainr7")


def test_a_worker_of_a_name_and_another_id_is_none_of_the_group() -> None:
    group = view(FIRST, SECOND)
    assert group.resolve(WorkerInfo("first", 1)) == FIRST
    with pytest.raises(UnknownWorkerError):
        group.resolve(WorkerInfo("first", 2))


def test_a_gone_incarnation_never_comes_back() -> None:
    group = view(FIRST)
    group.leave(FIRST.incarnation, "it died")
    with pytest.raises(WorkerLostError, match=r"'first' \(incarnation 65\) was given up: it died"):
        group.join(FIRST)
    group.leave(SECOND.incarnation, "it died before it was known")
    with pytest.raises(WorkerLostError):
        group.join(SECOND)
    assert group.present() == [ME]


def test_a_worker_that_returns_is_a_new_incarnation_and_takes_its_name_over() -> None:
    group = view(FIRST)
    group.leave(FIRST.incarnation, "it died")
    returned = member("first", 1, 999)
    assert group.join(returned)
    assert group.resolve("first") == group.resolve(1) == returned
    assert group.gone_reason(FIRST.incarnation) == "it died"
    assert group.gone_reason(returned.incarnation) is None


def test_a_static_group_lists_all_that_formed_it_and_a_dynamic_one_who_is_present() -> None:
    for static, expected in ((True, ["me", "first", "second"]), (False, ["me", "second"])):
        group = view(FIRST, SECOND, static=static)
        group.leave(FIRST.incarnation, "it died")
        assert [info.name for info in group.infos()] == expected
        assert [info.name for info in group.present()] == ["me", "second"]


def test_a_successor_is_not_forgotten_with_who_had_its_name() -> None:
    group = view(FIRST)
    group.leave(FIRST.incarnation, "it left")
    successor = member("first", 1, 999)
    group.join(successor)
    group.forget(FIRST.incarnation)
    assert group.resolve("first") == group.resolve(1) == successor


def test_joining_twice_is_noticed() -> None:
    group = view(FIRST)
    assert not group.join(FIRST)
    assert group.present() == [ME, FIRST]
