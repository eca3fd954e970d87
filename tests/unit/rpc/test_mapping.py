"""``rpc.map`` with calls that end at once: an interruption loses no item, wherever it comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import rpc
from rpc.agent.futures import Future
from rpc.runtime.current import clear_current_agent, set_current_agent
from rpc.runtime.interrupts import interruptible
from tests.support.interrupting import interrupted_at_check
from tests.support.local_agent import LocalAgent


@interruptible
def wait_for_room() -> None:
    """Where an agent may wait before it sends a call."""


class WaitingAgent(LocalAgent):
    """May wait before each call. That has ended when its future is returned."""

    def call_async(self, *what: Any) -> Future[Any]:
        wait_for_room()
        return super().call_async(*what)


@pytest.fixture
def _agent() -> Iterator[None]:
    agent = WaitingAgent()
    set_current_agent(agent)
    yield
    clear_current_agent(agent)


@pytest.mark.usefixtures("_agent", "deferred")
@pytest.mark.parametrize("ordered", [True, False])
def test_an_interruption_loses_no_item(ordered: bool) -> None:
    for number in itertools.count(1):
        results = rpc.map(abs, range(3), ordered=ordered, look_ahead=2)
        found: list[int] = []

        def read(results: Iterator[int] = results, found: list[int] = found) -> None:
            for each in results:
                found.append(each)  # noqa: PERF402  # nothing may come between

        is_interrupted = interrupted_at_check(number, read)
        read()
        assert sorted(found) == [0, 1, 2], number
        if not is_interrupted:
            return
