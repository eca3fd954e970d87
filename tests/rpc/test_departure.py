"""The way out of a group: whatever ends is noticed, at whatever moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rpc import departure as module
from rpc.departure import Departure
from rpc.wire import Frame, Kind, decode_one
from tests.rpc.clockwork import Clockwork
from tests.rpc.members import member, peer

LEADER, HERE = member("leader", 0), member("here", 1)


class Agent:
    """An agent's part: a loop, and one task, which ends on another thread right after it was counted."""

    def __init__(self, clockwork: Clockwork, members: Sequence[Any] | None) -> None:
        self.loop = clockwork
        self.own_peer = peer("here", 1)
        self.info, self.incarnation = HERE.info, HERE.incarnation
        self.deferred = SimpleNamespace(call=clockwork.call_soon)
        self.executor = SimpleNamespace(when_idle=self.when_idle)
        self.view = SimpleNamespace(present=list)
        self.sent: list[Any] = []
        leader = SimpleNamespace(incarnation=LEADER.incarnation, send=self.send)
        self.peer_by_incarnation = {LEADER.incarnation: leader}.get
        self.tasks = 0
        self.on_idle: Callable[[], None] | None = None
        self.departure = Departure(self, members)  # type: ignore[arg-type]

    def on_closed(self, handler: Callable[[], object]) -> None:
        self.close = handler

    def on_loop(self, function: Callable[..., Any], *args: object) -> None:
        function(*args)

    def when_idle(self, callback: Callable[[], None] | None) -> None:
        self.on_idle = callback

    def something_ended(self) -> None:
        self.deferred.call(self.departure.look)

    def under_way(self) -> int:
        counted, self.tasks = self.tasks, 0
        if counted and self.on_idle is not None:
            self.on_idle()
        return counted

    def begun(self) -> int:
        return 1

    def send(self, buffers: Sequence[Any], size: int, *, wait: float) -> None:
        self.sent.append(decode_one(bytearray().join(buffers)).header["message"])

    def hear(self, *message: Any) -> None:
        """The leader says something."""
        leader = self.peer_by_incarnation(LEADER.incarnation)
        self.departure.received(leader, Frame(Kind.SHUTDOWN, 0, {"message": list(message)}, []))  # type: ignore[arg-type]


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.mark.parametrize("members", [[HERE], None], ids=["static", "dynamic"])
def test_the_last_task_may_end_between_being_counted_and_being_listened_for(
    clockwork: Clockwork, members: Sequence[Any] | None
) -> None:
    agent = Agent(clockwork, members)
    outcomes: list[str | None] = []
    agent.tasks = 1
    agent.departure._begin(outcomes.append, 0)
    assert outcomes == []
    clockwork.advance(1)
    assert outcomes == [None]


def test_a_follower_whose_last_task_ends_while_it_answers_the_leader_says_so(clockwork: Clockwork) -> None:
    agent = Agent(clockwork, [LEADER, HERE])
    agent.departure._begin(lambda _: None, 0)
    agent.tasks = 1
    agent.hear(0, "probe", 1, [])
    clockwork.advance(1)
    assert [message[1] for message in agent.sent] == ["entered", "report", "idle"]
