"""What a member answers to newcomers."""

from __future__ import annotations

import threading

import pytest

from rpc.errors import GivenUpError
from spmd.elastic.agreement import Member
from spmd.elastic.views import Views


def test_member_that_leaves_does_not_say_that_there_is_no_job() -> None:
    views = object.__new__(Views)  # without an agent
    views.core, views.changed, views.name = Member(1, 7), threading.Condition(), "worker"
    views.description = "a job"
    views.core.left = True
    with pytest.raises(GivenUpError, match="worker 'worker' is leaving the elastic job"):
        views.greeted(2, (0, 2), "a job", (2,))
