"""When a member proposes a view, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spmd.elastic import proposer
from spmd.elastic.agreement import Member, View
from spmd.elastic.proposer import Proposer
from spmd.elastic.views import Views

ME, OTHER = 1, 2
TIME_LIMIT = 60.0


class World:
    """A member that has lost the other one, which may live, and whose group's log does not answer.

    Attributes:
        freezes: how often the members were frozen.
        looks: released each time the proposer's thread has looked whether a view change is due.
    """

    def __init__(self) -> None:
        self.core = Member(ME, 5, view=View(1, (1, ME), (ME, OTHER), frozenset(), 0), ballot=(1, ME))
        self.log_is_read, self.installed = threading.Event(), threading.Event()
        self.freezes, self.looks = 0, threading.Semaphore(0)
        self.views: Any = SimpleNamespace(
            core=self.core, changed=threading.RLock(), woken=threading.Event(), me=ME, name="worker",
            released=threading.Event(), closed=False, error=None, suspected=None, newcomers={},
            ask=self._ask, is_due=self._is_due, living_newcomers=list,
        )  # fmt: skip
        self.views.losses = SimpleNamespace(
            is_lost=lambda each: each == OTHER, take_in=lambda: None, read_log=self.log_is_read.set
        )

    def _is_due(self) -> bool:
        self.looks.release()
        return not self.views.closed

    def _ask(
        self, members: Collection[int], function: Callable[..., Any], *args: Any, **how: Any
    ) -> dict[int, Any]:
        if function is Views.freeze:
            self.freezes += 1
            return {ME: self.core.freeze(args[0])}
        if function is Views.install:
            self.views.closed = True
            self.installed.set()
        return dict.fromkeys(members, True)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Its log was asked once, and is not to be asked again for an hour."""
    monkeypatch.setattr(proposer, "LOG_SECONDS", 3600.0)
    monkeypatch.setattr(proposer, "current_agent", lambda: None)
    found = World()
    Proposer(found.views).start()
    found.views.woken.set()
    assert found.log_is_read.wait(TIME_LIMIT)
    yield found
    found.views.closed = True
    found.views.woken.set()


def test_death_that_becomes_certain_ends_the_wait_for_the_log(world: World) -> None:
    world.core.witnessed(OTHER)
    world.views.woken.set()
    assert world.installed.wait(TIME_LIMIT), "it still waits for the log"


def test_members_that_are_woken_by_others_are_not_frozen_each_time(world: World) -> None:
    while world.looks.acquire(blocking=False):
        pass
    for _ in range(2):  # at the second look, all that has followed from the first one is over
        world.views.woken.set()
        assert world.looks.acquire(timeout=TIME_LIMIT)
    assert world.freezes == 1
