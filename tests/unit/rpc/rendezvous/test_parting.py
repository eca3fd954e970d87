"""Which workers are in a dynamic group: decisions about newcomers, and about lost members."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.rendezvous.arrivals import ArrivalKind, Verdict
from rpc.rendezvous.parting import Action, Admission, Contact, Part, admission, parting

MEMBER, ANNOUNCED = True, False
MET, TRYING, LOST, DEAD = Contact.MET, Contact.TRYING, Contact.LOST, Contact.DEAD


@pytest.mark.parametrize(
    ("earlier", "outcome"),
    [
        ([], Admission.FOUNDED),
        ([(MEMBER, DEAD), (ANNOUNCED, DEAD)], Admission.FOUNDED),
        ([(MEMBER, MET)], Admission.JOINED),
        ([(MEMBER, LOST)], Admission.REFUSED),
        ([(MEMBER, LOST), (ANNOUNCED, MET)], Admission.REFUSED),
        ([(MEMBER, LOST), (MEMBER, TRYING)], Admission.WAIT),
        ([(ANNOUNCED, MET)], Admission.WAIT),
        ([(ANNOUNCED, LOST)], Admission.WAIT),
        ([(MEMBER, DEAD), (ANNOUNCED, MET)], Admission.WAIT),
    ],
)
def test_a_newcomer_joins_through_a_member_and_founds_only_when_nobody_lives(
    earlier: list[tuple[bool, Contact]], outcome: Admission
) -> None:
    for order in permutations(earlier):
        assert admission(order) is outcome


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(Contact))))
def test_a_newcomer_that_has_met_no_member_founds_nothing_beside_one_that_may_live(
    earlier: list[tuple[bool, Contact]],
) -> None:
    outcome = admission(earlier)
    if outcome is Admission.FOUNDED:
        assert all(contact is DEAD for _, contact in earlier)
    if outcome is Admission.JOINED:
        assert (MEMBER, MET) in earlier


parts = st.builds(Part, st.integers(1, 5), st.frozensets(st.integers(0, 6), min_size=1))


@given(parts, parts)
def test_of_two_parts_that_both_ask_at_most_one_stays(one: Part, other: Part) -> None:
    apart = Part(other.place + (other.place == one.place), other.members - one.members or frozenset({9}))
    assert one.outweighs(apart) is not apart.outweighs(one)


@given(parts)
def test_a_question_says_which_part_asks(part: Part) -> None:
    verdict = Verdict(ArrivalKind.MEMBER, "3").asking(part.question())
    assert verdict.worker_id == 3
    assert Part.that_asks(verdict.question) == part
    assert Verdict.unpack(verdict.pack()) == verdict


def test_the_larger_part_stays_and_of_equal_ones_the_older() -> None:
    assert Part(5, frozenset({1, 2})).outweighs(Part(1, frozenset({3})))
    assert Part(1, frozenset({1})).outweighs(Part(2, frozenset({3})))
    assert not Part(1, frozenset({1, 2, 3})).outweighs(Part(2, frozenset({2, 3})))  # which are with the other


FREE = Verdict(ArrivalKind.MEMBER, "1")
ASKED = FREE.asking("4 a")


@pytest.mark.parametrize(
    ("verdict", "asked", "ended", "is_late", "action"),
    [
        (FREE, None, False, False, Action.ASK),
        (FREE, None, True, False, Action.REMOVE),
        (ASKED, "4 a", False, False, Action.WAIT),
        (ASKED, "4 a", False, True, Action.REMOVE),
        (ASKED, "4 a", True, False, Action.REMOVE),
        (ASKED, None, False, False, Action.WAIT),  # another part has asked it
        (FREE, "4 a", False, True, Action.YIELD),
        (Verdict(ArrivalKind.GONE), "4 a", False, True, Action.NOTHING),
        (None, None, False, False, Action.NOTHING),
        (Verdict(ArrivalKind.ANNOUNCED, "1"), None, False, False, Action.ASK),
    ],
)
def test_a_lost_worker_is_asked_and_taken_out_when_it_does_not_answer(
    verdict: Verdict | None, asked: str | None, ended: bool, is_late: bool, action: Action
) -> None:
    assert parting(verdict, asked, ended=ended, is_late=is_late) is action
