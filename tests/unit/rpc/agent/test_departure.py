"""The way out of a group: whatever ends is noticed, at whatever moment, and so is the end of the agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent import departure as module
from rpc.agent.departure import Departure
from rpc.errors import RpcTimeoutError
from rpc.wire.frames import Frame, Kind, decode_one
from tests.support.clockwork import Clockwork
from tests.support.members import member, peer
from tests.support.stepping import Step

LEADER, HERE = member("leader", 0), member("here", 1)


class Agent:
    """An agent's part: a loop, and one task, which ends on another thread right after it was counted."""

    def __init__(self, clockwork: Clockwork, members: Sequence[Any] | None) -> None:
        self.loop = clockwork
        self.own_peer = peer("here", 1)
        self.info, self.incarnation = HERE.info, HERE.incarnation
        self.mailbox = SimpleNamespace(call=clockwork.call_soon)
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
        self.mailbox.call(self.departure.look)

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


# ---- what ends while nobody is told yet


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
    assert [message[1] for message in agent.sent] == ["entered", "report", "changed"]


# ---- the agent ends


def test_a_round_that_begins_when_the_agent_is_closed_ends_at_once(clockwork: Clockwork) -> None:
    agent = Agent(clockwork, [LEADER, HERE])
    agent.close()
    with pytest.raises(RpcTimeoutError, match="another thread has ended the agent"):
        agent.departure.wait(0)


@pytest.mark.parametrize("first", ["the round begins", "the agent closes"])
def test_a_round_ends_whenever_another_thread_closes_the_agent(clockwork: Clockwork, first: str) -> None:
    """Before any instruction of the one, the other is done as a whole."""
    step = None
    while step is None or step.taken:
        agent = Agent(clockwork, [LEADER, HERE])
        outcomes: list[str | None] = []

        def begin(agent: Agent = agent, outcomes: list[str | None] = outcomes) -> None:
            agent.departure._begin(outcomes.append, 0)

        doing, other = (begin, agent.close) if first == "the round begins" else (agent.close, begin)
        step = Step(1 if step is None else step.number + 1, other, files=[module.__file__])
        with step:
            doing()
        if not step.taken:
            other()
        assert set(outcomes) == {"another thread has ended the agent"}, step.number
    assert step.number > 10


def test_who_wants_to_wait_when_the_loop_has_ended_is_told_who_ended_it(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(clockwork, [LEADER, HERE])

    def refuse(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(agent, "on_loop", refuse)
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        agent.departure.wait(0)
    agent.close()
    with pytest.raises(RpcTimeoutError, match="another thread has ended the agent"):
        agent.departure.wait(0)
