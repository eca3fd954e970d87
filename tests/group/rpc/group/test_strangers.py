"""Strangers get no further than the challenge, whatever they know, and in numbers they do a worker no harm.

What else they may say is in ``unit/rpc/group/test_greeting.py``.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch

import rpc
from rpc.bulk.streams import _Streams
from rpc.runtime.current import current_agent
from rpc.wire.frames import PREAMBLE, Kind
from tests.support import backend
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.serving import first_of, in_group, serve
from tests.support.transfers import ACROSS, MIB
from tests.support.workers import RunWorkers, Worker

pytestmark = backend.over_sockets

TOKEN = "a token that only the tests know"


def my_name(*_: Any) -> str:
    return rpc.get_worker_info().name


def memory() -> int:
    """The most that this process has ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def come_in_crowds(_: Worker) -> int:
    at: Target = rpc.rpc_sync("worker1", target)
    before = rpc.rpc_sync("worker1", memory)
    for _crowd in range(20):
        with contextlib.ExitStack() as crowd:
            peers = [crowd.enter_context(Hostile(at)) for _ in range(20)]
            for peer in peers:
                peer.say(PREAMBLE, bytes(20_000))  # an empty frame of kind 0, many times
            assert all(peer.is_hung_up() for peer in peers)
    return int(rpc.rpc_sync("worker1", memory)) - int(before)


def test_strangers_take_no_memory(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, come_in_crowds) < 30


def limit_descriptors() -> None:
    """Leaves this process no more than a few descriptors to open."""
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def take_all_descriptors(_: Worker) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    rpc.rpc_sync("worker1", limit_descriptors)
    with contextlib.ExitStack() as crowd:
        for _number in range(40):
            crowd.enter_context(Hostile(at))
        rpc.rpc_sync("worker1", my_name)  # whom one knows one goes on talking to
    with Hostile(at) as peer:
        peer.say(b"hello?")
        assert peer.is_hung_up()
    return str(rpc.rpc_sync("worker1", my_name))


def test_a_worker_out_of_descriptors_says_so_once_and_recovers(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(take_all_descriptors), serve])
    assert workers.results() == ["worker1", None]
    warnings = [line for line in workers[1].log_lines() if "cannot accept connections on unix:@" in line]
    assert len(warnings) == 1
    assert "Too many open files" in warnings[0]


# ---- who has no token, and knows everything else


def everything_else(at: Target, stream_token: bytes) -> dict[str, bytes]:
    """What strangers say who know who is there, the group, and what goes over the network."""
    me = replace(at.member, incarnation=5)
    hello = PREAMBLE + frame(
        Kind.HELLO, {"member": me.to_wire(), "wanted": at.member.incarnation, "group": at.group}, call_id=0
    )
    stream = PREAMBLE + frame(Kind.STREAM, {"token": stream_token, "number": 0}, call_id=0)
    call = frame(Kind.CALL, {}, [b"cos\nsystem\n(S'false'\ntR."])
    proof = frame(Kind.PROOF, {"nonce": bytes(32), "mac": bytes(32)}, call_id=0)
    welcome = frame(Kind.WELCOME, {"nonce": bytes(32), "mac": bytes(32)}, call_id=0)
    return {
        "a call at once": PREAMBLE + call,
        "a call behind a hello": hello + call,
        "a call behind a wrong proof": hello + proof + call,
        "a welcome to oneself": hello + welcome + call,
        "a refusal of the challenge": hello + frame(Kind.REFUSED, {"code": "", "reason": ""}) + call,
        "a stream": stream + call,
        "a stream with a wrong proof": stream + proof + call,
        "two streams": stream + stream,
        "a stream, then a hello": stream + hello,
    }


def offered_token() -> bytes:
    """That of streams which worker 1 has just offered to worker 0."""
    agent = current_agent()
    peer = agent.group.peers.find("worker0")
    streams = agent.messages.bulk_streams._streams[peer] = _Streams(3)
    return streams.token


def attack(_: Worker) -> int:
    at: Target = replace(rpc.rpc_sync("worker1", target), authenticator=None)
    token = rpc.rpc_sync("worker1", offered_token)
    moves = everything_else(at, token)
    for move, said in moves.items():
        with Hostile(at, "tcp") as stranger:
            stranger.say(said)
            answers = stranger.hear_all()
            kinds = [each.kind for each in answers]
            assert kinds in ([], [Kind.CHALLENGE], [Kind.CHALLENGE, Kind.REFUSED]), (move, kinds)
            for each in answers:
                said_back = str(each.header)
                assert at.group not in said_back, move
                assert f"{at.member.incarnation:x}" not in said_back, move
                assert "worker1" not in said_back, move
    assert rpc.rpc_sync("worker1", my_name) == "worker1"
    return len(moves)


def test_without_the_token_nothing_that_a_stranger_knows_lets_it_in(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, attack, token=TOKEN, tcp_stripes=3, **ACROSS) == 9


def large_over_streams(_: Worker) -> bool:
    tensor = torch.arange(4 * MIB)
    results = [rpc.rpc_async("worker1", torch.neg, args=(tensor,)) for _ in range(4)]
    return all(torch.equal(result.wait(), -tensor) for result in results)


def test_streams_prove_that_they_belong_to_the_job(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, large_over_streams, token=TOKEN, tcp_stripes=3, **ACROSS)


# ---- on one host


def addresses(_: Worker) -> list[str]:
    return list(current_agent().addresses)


@pytest.mark.parametrize("options", [{}, {"token": TOKEN}, {"insecure": True}], ids=["key", "token", "none"])
def test_workers_on_one_host_can_be_reached_by_unix_sockets_only(
    run_workers: RunWorkers, options: dict[str, Any]
) -> None:
    (only,) = first_of(run_workers, addresses, **options)
    assert only.startswith("unix:@")


def call_as_another_user(_: Worker) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(65534)
        with Hostile(at) as stranger:
            stranger.say(stranger.hello(stranger.newcomer(1)))
            os.write(writing, b"turned away" if stranger.is_hung_up() else b"heard")
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reading, 100).decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_on_this_host_is_turned_away_without_a_word(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, call_as_another_user) == "turned away"


def join_by_environment(worker: Worker) -> list[str]:
    os.environ["FARCALL_TOKEN"] = TOKEN
    with worker.group(listen="127.0.0.1"):
        other = f"worker{1 - worker.rank}"
        assert rpc.rpc_sync(other, my_name) == other
        with socket.create_connection(("127.0.0.1", int(current_agent().addresses[-1].rpartition(":")[2]))):
            return list(current_agent().addresses)


def test_the_environment_gives_the_token_of_a_group_that_listens_on_a_network(
    run_workers: RunWorkers,
) -> None:
    for found in run_workers(join_by_environment, 2):
        assert [address.partition(":")[0] for address in found] == ["unix", "tcp"]
