"""When a member proposes a view, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from spmd.elastic import proposer
from spmd.elastic.agreement import Member, View
from spmd.elastic.proposer import Proposer
from spmd.elastic.views import Views

ME, OTHER = 1, 2
TIME_LIMIT = 60.0


def test_death_that_becomes_certain_ends_the_wait_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "LOG_SECONDS", 3600.0)
    core = Member(ME, 5, view=View(1, (1, ME), (ME, OTHER), frozenset(), 0), ballot=(1, ME))
    log_is_read, installed = threading.Event(), threading.Event()

    def ask(members: Collection[int], function: Callable[..., Any], *args: Any, **how: Any) -> dict[int, Any]:
        if function is Views.freeze:
            return {ME: core.freeze(args[0])}
        if function is Views.install:
            views.closed = True
            installed.set()
        return dict.fromkeys(members, True)

    views: Any = SimpleNamespace(core=core, changed=threading.RLock(), woken=threading.Event(), me=ME)
    views.losses = SimpleNamespace(
        is_lost=lambda each: each == OTHER, take_in=lambda: None, read_log=log_is_read.set
    )
    views.released, views.closed, views.error, views.suspected = threading.Event(), False, None, None
    views.name, views.ask, views.newcomers = "worker", ask, {}
    views.is_due, views.living_newcomers = (lambda: not views.closed), list
    found = Proposer.__new__(Proposer)  # without an agent
    found._views, found._core, found._is_lost, found._blocked_since = views, core, views.losses.is_lost, None
    found.start()
    views.woken.set()
    assert log_is_read.wait(TIME_LIMIT)
    core.witnessed(OTHER)
    views.woken.set()
    assert installed.wait(TIME_LIMIT), "it still waits for the log"
