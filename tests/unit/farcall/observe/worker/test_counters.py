"""What an agent's counters make of its events."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.observe.worker.counters import OTHERS, Counters
from rpc.agent.hooks import Hooks
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.runtime import spans
from rpc.runtime.events import CallEnded, Events, MessageSent, PeerLost, RequestEnded, RunBegun
from rpc.serialization.payload import EXCEPTION

NAMES = 40
"""Number of names that are told apart."""


def an_agent() -> Any:
    """What counters need of an agent."""
    peer = SimpleNamespace(name="w1", lost=None, is_self=False, connection=SimpleNamespace(scheme="tcp"))
    memory = SimpleNamespace(usage=lambda: (0, 0), sent_bytes=0, received_bytes=0)
    return SimpleNamespace(
        events=Events(),
        lifecycle=SimpleNamespace(hooks=Hooks()),
        calls=SimpleNamespace(table=[], requests=[]),
        messages=SimpleNamespace(shared_memory=memory),
        group=SimpleNamespace(peers=SimpleNamespace(all=lambda: [peer])),
        extensions={},
    )


def tell(agent: Any, handlers: str, event: Any) -> None:
    getattr(agent.events, handlers)(*(getattr(event, field.name) for field in fields(event)))


def call_ended(what: str, error: BaseException | None = None, header: Any = None) -> CallEnded:
    return CallEnded(1, "w1", what, 0.002, error, header)


def test_nobody_listens_to_calls_and_messages_before_counting_begins() -> None:
    agent = an_agent()
    counters = Counters(agent)
    events = agent.events
    per_call = (events.call_ended, events.run_begun, events.request_ended, events.message_sent)
    assert per_call == (None, None, None, None)
    assert not spans.is_listened_to()
    assert counters.observed()["on"] is False


def test_nobody_listens_after_the_agent_has_ended() -> None:
    agent = an_agent()
    Counters(agent).begin()
    assert agent.events.call_ended
    for closed in agent.lifecycle.hooks.closed:
        closed()
    assert agent.events.call_ended is None
    assert not spans.is_listened_to()


@pytest.fixture
def counting() -> Any:
    agent = an_agent()
    counters = Counters(agent)
    counters.begin()
    yield agent, counters
    counters.end()


@pytest.mark.parametrize(
    ("error", "header", "outcome"),
    [
        (None, None, "ok"),
        (None, {EXCEPTION: []}, "failed"),
        (RpcTimeoutError("late"), None, "timeout"),
        (WorkerLostError("w1", "gone"), None, "lost"),
        (CancelledError(), None, "cancelled"),
        (ValueError(), None, "error"),
    ],
)
def test_calls_are_counted_by_outcome(counting: Any, error: Any, header: Any, outcome: str) -> None:
    agent, counters = counting
    tell(agent, "call_ended", call_ended("f", error, header))
    function = counters.observed()["calls"]["f"]
    assert function["outcomes"] == {outcome: 1}
    counts, total = function["seconds"]
    assert (counts[-1], total) == (1, 0.002)


def test_number_of_names_is_bounded(counting: Any) -> None:
    agent, counters = counting
    for number in range(3 * NAMES):
        tell(agent, "call_ended", call_ended(f"f{number}"))
        spans.tell(spans.Span(f"span {number}"))
    found = counters.observed()
    assert len(found["calls"]) == len(found["spans"]) == NAMES + 1
    assert found["calls"][OTHERS]["outcomes"] == {"ok": 2 * NAMES}
    assert found["spans"][OTHERS][0] == 2 * NAMES


def test_requests_messages_and_lost_workers_are_counted(counting: Any) -> None:
    agent, counters = counting
    tell(agent, "run_begun", RunBegun("w1", 7, len, 0.5, 0.0))
    tell(agent, "request_ended", RequestEnded("w1", 7, failed=True))
    tell(agent, "request_ended", RequestEnded("w1", 8, failed=False))  # began before counting did
    tell(agent, "message_sent", MessageSent("w1", 1, 100))
    tell(agent, "message_sent", MessageSent("unknown", 1, 5))
    tell(agent, "peer_lost", PeerLost("w1", 1, "gone"))
    found = counters.observed()
    assert found["requests"]["len"]["outcomes"] == {"failed": 1}
    assert found["queued"][1] == 0.5
    assert found["sent"] == {"tcp": 100, "none": 5}
    assert found["peers"] == [0, 1, 0, 0]


class APeer:
    connected = False
    lost = None


def test_connection_that_is_made_again_is_counted_once(counting: Any) -> None:
    agent, counters = counting
    peer = APeer()
    for broke in agent.lifecycle.hooks.broke:
        broke(peer)
    assert counters.observed()["peers"] == [0, 0, 1, 0]
    peer.connected = True
    assert counters.observed()["peers"] == [0, 0, 1, 1]
    assert counters.observed()["peers"] == [0, 0, 1, 1]
