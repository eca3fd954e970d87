from __future__ import annotations

import socket

import pytest

from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous import host_identity
from rpc.rendezvous.liveness import dead_among, probe
from tests.unit.rpc.rendezvous.conftest import StartWorker


def member(*addresses: str, host: str = "another host") -> Member:
    return Member(WorkerInfo("w", 0), hash(addresses), host, addresses)


def test_worker_on_this_host_is_asked_at_its_unix_address(start_worker: StartWorker) -> None:
    worker = start_worker("w", 0)
    assert probe(worker.member) is True
    worker.die()
    assert probe(worker.member) is False


@pytest.mark.parametrize("host", ["another host", host_identity()])
def test_worker_is_asked_at_its_tcp_address(host: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        assert probe(member(address, host=host)) is True
    assert probe(member(address, host=host)) is False


def test_unix_address_of_another_host_tells_nothing(start_worker: StartWorker) -> None:
    worker = start_worker("w", 0)
    assert probe(member(*worker.member.addresses)) is None


@pytest.mark.parametrize(
    "addresses", [(), ("tcp:nonsense",), ("tcp:no.such.host.invalid:1",), ("carrier:pigeon",)]
)
def test_what_cannot_be_asked_tells_nothing(addresses: tuple[str, ...]) -> None:
    assert probe(member(*addresses)) is None


def test_only_the_certainly_dead_are_dead() -> None:
    answers = {"a": True, "b": False, "c": None, "d": False}
    members = [Member(WorkerInfo(name, rank), rank, "", ()) for rank, name in enumerate(answers)]
    assert dead_among(members, lambda each: answers[each.name]) == {1, 3}
    assert dead_among(members[1:2], lambda each: answers[each.name]) == {1}
    assert dead_among([], probe) == set()
