from __future__ import annotations

import errno
import os
import socket
import sys

import pytest

from rpc.errors import RendezvousError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.address import (
    LifeSign,
    as_others_reach_it,
    dead_among,
    host_identity,
    is_loopback,
    listen_address,
    loopback_remark,
    probe,
)
from tests.support.ports import reserved_port
from tests.unit.rpc.rendezvous.conftest import StartWorker

__all__ = ["reserved_port"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.5.5.5", "::1"])
def test_loopback_is_known_by_its_text(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "myhost", "localhost.example.org"])
def test_everything_else_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.1.1", "Here head means 127.0.1.1, which is on each machine itself"), ("10.0.0.1", "")],
)
def test_name_that_means_loopback_is_remarked_on(
    monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert loopback_remark("head").strip().startswith(said)
    assert bool(loopback_remark("head")) == bool(said)


# Where to listen


@pytest.mark.parametrize("master", [None, "localhost", "127.0.0.1"])
def test_rendezvous_on_loopback_or_in_a_file_listens_on_loopback(master: str | None) -> None:
    assert listen_address(master) == ("127.0.0.1", 0)
    assert listen_address("::1") == ("::1", 0)


def test_workers_that_are_all_on_this_host_listen_on_loopback() -> None:
    assert listen_address("192.0.2.7", single_host=True) == ("127.0.0.1", 0)


def route(monkeypatch: pytest.MonkeyPatch, routes: dict[str, str]) -> None:
    """The kernel's routes from now on: from a host's address to this machine's on the way there."""

    class Routed(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            self.towards = address[0]

        def getsockname(self) -> tuple[str, int]:
            return routes[self.towards], 1

    monkeypatch.setattr(socket, "socket", Routed)


def test_other_host_is_listened_for_on_the_route_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    route(monkeypatch, {"192.0.2.7": "10.1.2.3"})
    assert listen_address("192.0.2.7") == ("10.1.2.3", 0)


def test_host_that_calls_itself_loopback_is_listened_on_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    route(monkeypatch, {"127.0.1.1": "127.0.1.1", "192.0.2.1": "10.1.2.3"})
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listen_address("myself") == ("10.1.2.3", 0)


def test_unknown_master_is_an_error_that_names_it() -> None:
    with pytest.raises(RendezvousError, match=r"'no\.such\.host\.invalid'.*listen="):
        listen_address("no.such.host.invalid")


ELSEWHERE = {"192.0.2.1": "10.1.2.3", "2001:db8::1": "fd00::3"}


@pytest.mark.parametrize(
    ("address", "master", "routes", "told"),
    [
        ("grpc:0.0.0.0:50051/trainer", "192.0.2.7", {"192.0.2.7": "10.4.5.6"}, "grpc:10.4.5.6:50051/trainer"),
        ("tcp:0.0.0.0:80", "fd00::7", ELSEWHERE | {"fd00::7": "fd00::1"}, "tcp:10.1.2.3:80"),
        ("tcp:0.0.0.0:80", "localhost", {}, "tcp:127.0.0.1:80"),
        ("tcp:[::]:80", "fd00::7", {"fd00::7": "fd00::1"}, "tcp:[fd00::1]:80"),
        ("tcp:[::]:80", "192.0.2.7", {"192.0.2.7": "10.4.5.6"}, "tcp:10.4.5.6:80"),
        ("tcp:10.9.9.9:80", "192.0.2.7", {}, "tcp:10.9.9.9:80"),
        ("unix:@farcall-1", None, {}, "unix:@farcall-1"),
    ],
)
def test_others_are_told_no_wildcard(
    monkeypatch: pytest.MonkeyPatch, address: str, master: str | None, routes: dict[str, str], told: str
) -> None:
    route(monkeypatch, routes)
    assert as_others_reach_it(address, master) == told


@pytest.mark.parametrize(("wildcard", "told"), [("0.0.0.0", "tcp:127.0.0.1:80"), ("[::]", "tcp:[::1]:80")])
def test_without_a_network_a_wildcard_is_told_as_loopback(
    monkeypatch: pytest.MonkeyPatch, wildcard: str, told: str
) -> None:
    class Cut(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Cut)
    assert as_others_reach_it(f"tcp:{wildcard}:80", None) == told


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets and namespaces are Linux's")
def test_host_identity_is_that_of_the_network_namespace() -> None:
    assert host_identity().endswith(f"{os.stat('/proc/self/ns/net').st_ino:x}")


# Who lives


def member(*addresses: str, host: str = "another host") -> Member:
    return Member(WorkerInfo("w", 0), 1, host, addresses)


def test_worker_on_this_host_is_asked_at_its_unix_address(start_worker: StartWorker) -> None:
    worker = start_worker("w", 0)
    assert probe(worker.member) is True
    worker.die()
    assert probe(worker.member) is False


@pytest.mark.parametrize("host", ["another host", host_identity()])
def test_worker_is_asked_at_its_tcp_address(host: str, reserved_port: int) -> None:
    address = f"tcp:127.0.0.1:{reserved_port}"
    with socket.create_server(("127.0.0.1", reserved_port)):
        assert probe(member(address, host=host)) is True
    assert probe(member(address, host=host)) is False


@pytest.mark.skipif(not LifeSign.available, reason="abstract sockets are Linux's")
def test_worker_on_this_host_without_unix_address_is_asked_at_its_sign() -> None:
    sign = LifeSign()
    with socket.create_server(("127.0.0.1", 0)) as another:
        addresses = f"tcp:127.0.0.1:{another.getsockname()[1]}", sign.address
        assert probe(member("tcp:127.0.0.1:1", sign.address, host=host_identity())) is True
        sign.close()
        assert probe(member(*addresses, host=host_identity())) is False
        assert probe(member(*addresses)) is True, "the sign of another host tells nothing"


def test_unix_address_of_another_host_tells_nothing(start_worker: StartWorker) -> None:
    assert probe(member(*start_worker("w", 0).member.addresses)) is None


@pytest.mark.parametrize(
    "addresses",
    [
        (),
        ("tcp:nonsense",),
        ("tcp:no.such.host.invalid:1",),
        ("carrier:pigeon",),
        ("grpc:127.0.0.1:1;advertised",),
        ("grpc:127.0.0.1:1/name;advertised",),
    ],
)
def test_what_cannot_be_asked_tells_nothing(addresses: tuple[str, ...]) -> None:
    assert probe(member(*addresses)) is None


def test_only_the_certainly_dead_are_dead() -> None:
    answers = {"a": True, "b": False, "c": None, "d": False}
    members = [Member(WorkerInfo(name, rank), rank, "", ()) for rank, name in enumerate(answers)]
    assert dead_among(members, lambda each: answers[each.name]) == {1, 3}
    assert dead_among(members[1:2], lambda each: answers[each.name]) == {1}
    assert dead_among([], probe) == set()
