"""The workers of a replica run the block of an attempt together."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spmd.elastic.agreement import Ballot, Member, View
from spmd.elastic.mates import Mates

VIEW = View(2, (3, 1), (1, 2), frozenset(), 4, 2)


def mates_of(*, lost: bool = False, answers: bool = True) -> Mates:
    """The other worker of the replica of worker 1."""
    losses: Any = SimpleNamespace(
        is_lost=lambda each: lost and each == 2, peer=lambda _: SimpleNamespace(name="other")
    )
    return Mates(
        Member(1, 5, (1, 2)),
        losses,
        threading.Condition(),
        lambda members, *_: dict.fromkeys(members, answers),
        lambda: False,
    )


@pytest.mark.parametrize(
    ("ballot", "step", "begins"), [((3, 1), 5, True), ((3, 1), 6, False), ((4, 2), 5, False)]
)
def test_block_is_run_if_the_other_worker_begins_the_same_attempt_and_not_a_later_one(
    ballot: Ballot, step: int, begins: bool
) -> None:
    mates = mates_of()
    mates.begins(2, (1, 1), 5)
    mates.begins(2, ballot, step)
    assert mates.begin_together(VIEW, 5) is begins


def test_worker_does_not_wait_for_one_that_is_lost() -> None:
    mates = mates_of(lost=True)
    assert not mates.begin_together(VIEW, 5)
    assert mates.lost() == ["other"]


def test_worker_does_not_wait_for_one_that_has_left_the_job() -> None:
    assert not mates_of(answers=False).begin_together(VIEW, 5)
