"""When a worker that cannot be reached is given up: not while its process waits for a core, nor this one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rpc.group.dialling import Dialler
from rpc.group.own_time import Neighbours, OwnTime
from rpc.group.peer import Peer
from rpc.runtime.process_signs import UNKNOWN, ProcessSigns
from tests.support.members import codec, member

PATIENCE = 30.0


class Desk:
    """The owner of a dialler, on a machine of the test's, and a worker that no attempt reaches."""

    def __init__(self, *, process: int | None = 4711) -> None:
        self.now = self.waited = 0.0
        self.signs: ProcessSigns | None = None
        self.lost: list[str] = []
        self.closed = False
        self.connect_seconds, self.reconnect_seconds = 20.0, PATIENCE
        self.own_time = OwnTime(lambda: self.now, lambda: self.waited)
        self.neighbours = Neighbours(lambda: {5000: 4711}, lambda _: self.signs)
        self.peer = Peer(member("callee", 1, None, "tcp:127.0.0.1:5000"), codec(), lambda _: None)
        self.peer.link.process = process
        self.pauses: list[float] = []
        self.attempts = 0
        loop: Any = SimpleNamespace(call_later=self._call_later, create_task=self._begin)
        self.dialler = Dialler(loop, {}, self)

    def _call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        self.pauses.append(seconds)
        self._after_pause = functools.partial(function, *args)

    def pass_pause(self) -> None:
        """Let the pause go by that has just begun, if one has."""
        if self.peer.link.paused:
            self.now += self.pauses[-1]
            self._after_pause()

    def _begin(self, attempt: Coroutine[Any, Any, None]) -> Any:
        self.attempts += 1
        attempt.close()
        return Mock()

    def reached(self, peer: Peer, connection: object) -> None:
        raise AssertionError("nobody is reached")

    def peer_broke(self, peer: Peer) -> None:
        """It is connected again."""

    def lose(self, peer: Peer, reason: str) -> None:
        self.lost.append(reason)

    def fail_until(self, when: float) -> bool:
        """Let one attempt after another fail, a second each; returns whether the worker is given up."""
        while self.now < when and not self.lost:
            self.peer.link.dial()
            self.dialler.failed(self.peer, "no answer")
            self.now += 1.0
        return bool(self.lost)


@pytest.mark.parametrize("process", [4711, None], ids=["known", "found by its port"])
def test_worker_whose_process_waits_for_a_core_is_not_given_up(process: int | None) -> None:
    desk = Desk(process=process)
    desk.signs = ProcessSigns(stopped=False, busy=True, ticks=5, start=1)
    assert not desk.fail_until(10 * PATIENCE)
    assert desk.peer.link.process == 4711


def test_worker_whose_process_gets_a_core_now_and_then_is_not_given_up() -> None:
    desk = Desk()
    for ticks in range(100):
        desk.signs = ProcessSigns(stopped=False, busy=False, ticks=ticks, start=1)
        assert not desk.fail_until(3.0 * ticks)


def test_worker_is_not_given_up_by_one_that_cannot_look() -> None:
    desk = Desk()
    desk.signs = UNKNOWN
    assert not desk.fail_until(10 * PATIENCE)


@pytest.mark.parametrize("process", [4711, None], ids=["known", "found by its port"])
@pytest.mark.parametrize(
    "signs",
    [
        ProcessSigns(stopped=True, busy=False, ticks=5, start=1),
        ProcessSigns(stopped=False, busy=False, ticks=5, start=1),
        None,
    ],
    ids=["stopped", "asleep", "ended"],
)
def test_worker_whose_process_does_nothing_is_given_up(
    signs: ProcessSigns | None, process: int | None
) -> None:
    desk = Desk(process=process)
    desk.signs = signs
    assert desk.fail_until(PATIENCE + 10)
    assert desk.now <= PATIENCE + 5
    assert desk.lost == ["no answer for 30 s"]


def test_time_in_which_this_process_waits_for_a_core_does_not_count() -> None:
    desk = Desk()
    desk.own_time = OwnTime(lambda: desk.now, lambda: 0.9 * desk.now)  # it gets a core for a tenth of it
    assert not desk.fail_until(9 * PATIENCE)
    assert desk.fail_until(11 * PATIENCE)


def test_clock_stands_still_while_this_process_waits_for_a_core_and_never_goes_back() -> None:
    waited = iter([0.0, 2.0, 0.0, 3.0])  # once, the kernel does not say
    now = iter([10.0, 12.0, 13.0, 14.0])
    own_time = OwnTime(lambda: next(now), lambda: next(waited))
    assert [own_time() for _ in range(4)] == [10.0, 10.0, 11.0, 11.0]


@pytest.mark.parametrize("progresses", [False, True])
def test_a_connection_that_breaks_at_once_is_made_again_after_a_pause_unless_something_came_over_it(
    progresses: bool,
) -> None:
    desk = Desk()
    session, link = desk.peer.session, desk.peer.link
    for _ in range(100):
        if desk.lost:
            break
        assert link.accept(desk.now)
        session.connect(session.connections + 1, 0, ())
        if progresses:
            session.take_in()
        desk.dialler.broke(desk.peer, "cut")
        desk.pass_pause()
    assert bool(desk.pauses) is not progresses
    assert desk.attempts == (100 if progresses else 1 + len(desk.pauses))
    assert bool(desk.lost) is not progresses
