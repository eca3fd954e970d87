"""The way out of a group: whatever ends is noticed, at whatever moment, and so is the end of the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.activity import Activity
from rpc.agent.departure import Departure
from rpc.agent.hooks import Hooks
from rpc.errors import RpcTimeoutError
from rpc.group.workers import Member
from rpc.runtime.loop import LoopThread
from rpc.runtime.mailbox import Mailbox
from rpc.wire.frames import Frame, Kind, decode_one
from tests.support.members import member
from tests.support.streams import SOON, until

LEADER, HERE = member("leader", 0), member("here", 1)


class Tasks:
    """An executor's part: of tasks that are counted, the last ends right after that, on another thread."""

    def __init__(self) -> None:
        self.left = 0
        self.on_idle: Callable[[], None] | None = None

    def active(self) -> int:
        counted, self.left = self.left, 0
        if counted and self.on_idle is not None:
            self.on_idle()
        return counted

    def when_idle(self, callback: Callable[[], None] | None) -> None:
        self.on_idle = callback


class Leaving:
    """A worker whose leader is played by the test."""

    def __init__(self, members: Sequence[Member] | None) -> None:
        self.loop_thread = LoopThread("test-loop", "not on this thread")
        self.tasks = Tasks()
        self.said: list[str] = []
        self.leader: Any = SimpleNamespace(incarnation=LEADER.incarnation, send=self._send)
        peers: Any = SimpleNamespace(
            by_incarnation={LEADER.incarnation: self.leader}.get, present=list, watch_over=None
        )
        self._hooks = Hooks()
        activity = Activity(Mailbox(self.loop_thread.loop), self.tasks)  # type: ignore[arg-type]
        connections: Any = None
        self.departure = Departure(activity, peers, connections, self.loop_thread, self._hooks)
        self.departure.form(HERE, members)
        self._thread = ThreadPoolExecutor(1)

    def _send(self, buffers: Sequence[Any], size: int, *, wait: float) -> None:
        self.said.append(decode_one(bytearray().join(buffers)).header["message"][1])

    def begin(self) -> Future[None]:
        """Waits on another thread."""
        return self._thread.submit(self.departure.wait, 0)

    def hear(self, *message: Any) -> None:
        """The leader says something."""
        frame = Frame(Kind.SHUTDOWN, 0, {"message": list(message)}, [])
        self.loop_thread.call(self.departure.received, self.leader, frame)

    def close(self) -> None:
        for handler in self._hooks.closed:
            handler()

    def end(self) -> None:
        self.close()
        self._thread.shutdown()
        assert self.loop_thread.stop()


@pytest.fixture
def leave() -> Iterator[Callable[[Sequence[Member] | None], Leaving]]:
    made: list[Leaving] = []

    def make(members: Sequence[Member] | None) -> Leaving:
        made.append(Leaving(members))
        return made[-1]

    yield make
    for each in made:
        each.end()


Leave = Callable[[Sequence[Member] | None], Leaving]


@pytest.mark.parametrize("members", [[HERE], None], ids=["static", "dynamic"])
def test_the_last_task_may_end_between_being_counted_and_being_listened_for(
    leave: Leave, members: Sequence[Member] | None
) -> None:
    worker = leave(members)
    worker.tasks.left = 1
    worker.begin().result(SOON)


def test_a_follower_whose_last_task_ends_while_it_answers_the_leader_says_so(leave: Leave) -> None:
    worker = leave([LEADER, HERE])
    worker.begin()
    until(lambda: worker.said == ["entered"])
    worker.tasks.left = 1
    worker.hear(0, "probe", 1, [])
    until(lambda: worker.said == ["entered", "report", "changed"])


def test_who_begins_to_wait_when_the_agent_is_closed_is_told_so(leave: Leave) -> None:
    worker = leave([LEADER, HERE])
    worker.close()
    with pytest.raises(RpcTimeoutError, match="another thread has ended the agent"):
        worker.departure.wait(0)
    worker.loop_thread.stop()
    with pytest.raises(RpcTimeoutError, match="another thread has ended the agent"):
        worker.departure.wait(0)


def test_a_second_thread_that_wants_to_wait_is_refused(leave: Leave) -> None:
    worker = leave(None)
    assert worker.departure.claim()
    assert not worker.departure.claim()
