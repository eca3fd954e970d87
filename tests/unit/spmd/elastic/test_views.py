"""What a member answers to newcomers, and gives them."""

from __future__ import annotations

import threading

import pytest

from rpc.errors import GivenUpError
from spmd.elastic.agreement import NEW, Member, View
from spmd.elastic.views import Views

VIEW = View(2, (2, 1), (1, 2), frozenset([2]), 7)


def member() -> Views:
    views = object.__new__(Views)  # without an agent
    views.core, views.changed, views.name = Member(1, 7), threading.Condition(), "worker"
    views.description = "a job"
    return views


def test_newcomer_gets_the_state_that_is_kept_when_the_step_begins() -> None:
    views, kept = member(), ["of the last step"]
    views.core.view, views.core.frozen = VIEW, False
    views.closed, views.error, views.given_step = False, None, NEW
    views._state = lambda: iter([list(kept)])

    def begin(timeout: float | None = None) -> bool:
        kept[:] = ["of this step"]
        views.given_step = 7
        return True

    views.changed.wait = begin  # type: ignore[method-assign]
    assert list(views.give(VIEW.ballot, 7)) == [None, ["of this step"]]


def test_member_that_leaves_does_not_say_that_there_is_no_job() -> None:
    views = member()
    views.core.left = True
    with pytest.raises(GivenUpError, match="worker 'worker' is leaving the elastic job"):
        views.greeted(2, (0, 2), "a job", (2,))
