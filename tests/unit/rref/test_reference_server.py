"""Requests for an object that is made at just that moment: they are answered, and no longer under way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.received_requests import Request
from rpc.agent.tape import Tracing
from rpc.runtime.executor import Task
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame
from rref.reference_server import ReferenceServer
from rref.requests import FETCH, fetch
from rref.value import Fetch, Value
from tests.support.members import peer
from tests.support.noted_activity import NotedActivity


class JustMade(Value):
    """An object that is made right after it was looked at."""

    def park(self, fetch: Fetch) -> bool:
        self.set(5)
        return super().park(fetch)

    def when_ready(self, callback: Callable[[], object]) -> bool:
        self.set(5)
        return super().when_ready(callback)


class Agent:
    """An agent's part: it takes in fetches, and notes how many are postponed when it is told."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[Any, Frame], Task | None]] = {}
        self.activity = NotedActivity()

    def on(self, kind: int, handler: Callable[[Any, Frame], Task | None], **_: bool) -> None:
        self.handlers[kind] = handler

    def count(self) -> None:
        pass

    def accept(self, request: Request, run: Callable[[Request], None]) -> Task:
        return run, request


@pytest.mark.parametrize("header", [{}, {"type": True}], ids=["the object", "its type"])
def test_who_waits_to_leave_is_told_of_a_fetch_that_need_not_wait_after_all(header: dict[str, Any]) -> None:
    agent: Any = Agent()
    references: Any = SimpleNamespace(find=lambda _: JustMade())
    delayed: Any = SimpleNamespace(answer_fetch=lambda *_: None)
    unused: Any = None
    calls: Any = SimpleNamespace(requests=agent, answers=unused)
    ReferenceServer(
        references,
        unused,
        calls,
        agent,
        agent.activity,
        unused,
        Serializer(),
        Tracing().recording_of,
        delayed,
    )
    agent.handlers[FETCH](peer(), Frame(FETCH, 1, header, fetch((1, 2)).buffers))
    assert agent.activity.told == [0]
