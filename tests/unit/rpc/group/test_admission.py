"""Admission: the wanted worker accepts members of its group, with one connection per pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.group.admission import CROSSED, GONE, MISTAKEN, STRANGER, judge
from rpc.group.handshake import Hello, Refusal
from rpc.group.membership import Membership
from rpc.group.workers import Member
from tests.support.effort import PROFILE
from tests.support.members import member

ME = member("me", 0, 500)
SMALLER, LARGER = member("smaller", 1, 400), member("larger", 2, 600)
GROUP = "job/1"


def view(*others: Member, static: bool = True) -> Membership:
    made = Membership(ME, static=static)
    for other in others:
        made.join(other)
    return made


def judged(
    who: Member,
    group: Membership,
    *,
    wanted: int = ME.incarnation,
    name: str = GROUP,
    connected: bool = False,
    connecting: bool = False,
) -> Refusal | None:
    return judge(Hello(who, wanted, name), group, GROUP, connected=connected, connecting=connecting)


def code(refusal: Refusal | None) -> str:
    return refusal.code if refusal else "welcome"


@pytest.mark.parametrize(
    ("refusal", "expected_code", "parts"),
    [
        (judged(SMALLER, view(SMALLER), name="job/2"), STRANGER, ["another group", "'job/2'"]),
        (judged(SMALLER, view(SMALLER), wanted=501), MISTAKEN, ["wanted incarnation 1f5", "no longer"]),
        (judged(SMALLER, view()), STRANGER, ["is not among the workers that formed the group"]),
        (
            judged(member("smaller", 1, 400, "tcp:elsewhere:1"), view(SMALLER)),
            STRANGER,
            ["describes itself otherwise"],
        ),
        (judged(member("larger", 3, 400), view(SMALLER)), STRANGER, ["describes itself otherwise"]),
        (judged(ME, view(SMALLER)), STRANGER, ["claims to be that very worker"]),
        (judged(SMALLER, view(SMALLER), connected=True), CROSSED, ["connected already"]),
        (judged(LARGER, view(LARGER), connecting=True), CROSSED, ["just connecting"]),
    ],
)
def test_a_refusal_names_both_sides_and_says_why(
    refusal: Refusal, expected_code: str, parts: list[str]
) -> None:
    assert refusal.code == expected_code
    for part in ["asked worker 'me' (id 0)", *parts]:
        assert part in refusal.reason


@pytest.mark.parametrize(
    "refusal", [judged(SMALLER, view(SMALLER), name="job/2"), judged(SMALLER, view(), wanted=501)]
)
def test_a_refusal_does_not_tell_a_stranger_what_would_let_it_in(refusal: Refusal) -> None:
    assert not any(secret in refusal.reason for secret in ("1f4", GROUP))
    assert any(secret in refusal.detail for secret in ("1f4", GROUP))


def test_a_gone_worker_is_refused_with_the_reason_why_it_is_held_to_be_gone() -> None:
    group = view(SMALLER)
    group.leave(SMALLER.incarnation, "its connection broke")
    refusal = judged(SMALLER, group)
    assert code(refusal) == GONE
    assert refusal is not None
    assert "worker 'smaller' asked worker 'me'" in refusal.reason
    assert "given it up (its connection broke)" in refusal.reason


@PROFILE
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_of_two_simultaneous_attempts_exactly_one_counts(left: int, right: int) -> None:
    if left == right:
        return
    members = [member("left", 0, left), member("right", 1, right)]
    verdicts = []
    for me, other in (members, reversed(members)):
        group = Membership(me, static=True)
        group.join(other)
        hello = Hello(other, me.incarnation, GROUP)
        verdicts.append(code(judge(hello, group, GROUP, connected=False, connecting=True)))
    assert sorted(verdicts) == [CROSSED, "welcome"]


# ---- dynamic groups


def test_a_newcomer_joins_a_dynamic_group_with_its_first_hello() -> None:
    group = view(static=False)
    assert judged(LARGER, group) is None
    assert group.present() == [ME, LARGER]
    assert judged(LARGER, group) is None


def test_a_newcomer_with_a_name_that_is_taken_is_refused() -> None:
    group = view(SMALLER, static=False)
    refusal = judged(member("smaller", 7, 700), group)
    assert code(refusal) == STRANGER
    assert refusal is not None
    assert "the name 'smaller' is taken by worker 'smaller' (id 1)" in refusal.reason
    assert group.present() == [ME, SMALLER]


@pytest.mark.parametrize("reason", ["name", "wanted"])
def test_nobody_joins_with_a_hello_that_is_refused(reason: str) -> None:
    group = view(static=False)
    refused = {"name": judged(LARGER, group, name="job/2"), "wanted": judged(LARGER, group, wanted=1)}
    assert refused[reason] is not None
    assert group.present() == [ME]
