"""A worker's messages to itself: most are dispatched on whatever thread sends them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import rpc
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.wire.frames import Frame, Kind, encode_small
from tests.support.serving import first_of
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker


def fail_to_dispatch(_: Worker) -> str:
    agent = current_agent()
    threads: list[str] = []
    lose = agent.connections.lose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            agent.connections,
            "lose",
            lambda *_: threads.append(threading.current_thread().name),
            raising=True,
        )
        call = agent.calls.open(agent.peer("worker1"), "asked", 0.0)
        agent.own_peer.send_small(encode_small(Kind.REPLY, call.call_id, {}, [b""]), 0)
        until(lambda: threads)
        agent.calls.take(call.call_id)
    assert agent.connections.lose == lose
    return threads[0]


def test_a_malformed_message_to_oneself_is_dealt_with_on_the_loop(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, fail_to_dispatch) == "farcall-loop"


def threads_that_take_in(_: Worker) -> list[str]:
    """Calls to oneself with a number, and with a reference."""
    agent = current_agent()
    threads: list[str] = []
    frames_received = agent.frames_received

    def noting(peer: Peer, frames: list[Frame]) -> None:
        if frames[0].kind == Kind.CALL and peer.is_self:
            threads.append(threading.current_thread().name)
        frames_received(peer, frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "frames_received", noting)
        for argument in (1, rpc.RRef(1)):
            call: Any = rpc.rpc_async("worker0", type, args=(argument,))
            call.wait()
    return threads


def test_a_call_to_oneself_is_taken_in_on_the_loop_if_it_brings_a_reference(run_workers: RunWorkers) -> None:
    """There, Ctrl-C cannot leave the call half taken in."""
    caller = threading.main_thread().name
    assert first_of(run_workers, threads_that_take_in) == [caller, "farcall-loop"]
