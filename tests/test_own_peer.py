"""A worker's messages to itself, which are dispatched on whatever thread sends them."""

from __future__ import annotations

import threading

import pytest

from rpc.current import current_agent
from rpc.wire import Kind, encode_small
from tests.rpc.streams import until
from tests.serving import first_of
from tests.workers import RunWorkers, Worker


def fail_to_dispatch(_: Worker) -> str:
    agent = current_agent()
    threads: list[str] = []
    lose = agent.links.lose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            agent.links, "lose", lambda *_: threads.append(threading.current_thread().name), raising=True
        )
        call = agent.calls.open(agent.peer("worker1"), "asked", 0.0)
        agent.own_peer.send_small(encode_small(Kind.REPLY, call.call_id, {}, [b""]), 0)
        until(lambda: threads)
        agent.calls.take(call.call_id)
    assert agent.links.lose == lose
    return threads[0]


def test_a_malformed_message_to_oneself_is_dealt_with_on_the_loop(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, fail_to_dispatch) == "farcall-loop"
