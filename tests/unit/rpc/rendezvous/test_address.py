from __future__ import annotations

import os
import socket
import sys

import pytest

from rpc.errors import RendezvousError
from rpc.rendezvous import address, host_identity, is_loopback, listen_address


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.5.5.5", "::1"])
def test_loopback_is_known_by_its_text(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "myhost", "localhost.example.org"])
def test_everything_else_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("master", [None, "localhost", "127.0.0.1"])
def test_rendezvous_on_loopback_or_in_a_file_listens_on_loopback(master: str | None) -> None:
    assert listen_address(master) == ("127.0.0.1", 0)
    assert listen_address("::1") == ("::1", 0)


def test_workers_that_are_all_on_this_host_listen_on_loopback() -> None:
    assert listen_address("192.0.2.7", single_host=True) == ("127.0.0.1", 0)


def test_option_is_taken_as_it_is() -> None:
    assert listen_address("localhost", option="0.0.0.0:81") == ("0.0.0.0", 81)


def test_other_host_is_listened_for_on_the_route_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def route(where: tuple[str, int], family: int) -> str:
        asked.append(where)
        return "10.1.2.3"

    monkeypatch.setattr(address, "_address_towards", route)
    assert listen_address("192.0.2.7") == ("10.1.2.3", 0)
    assert asked == [("192.0.2.7", 1)]


def test_host_that_calls_itself_loopback_is_listened_on_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {"192.0.2.1": "10.1.2.3"}
    monkeypatch.setattr(address, "_address_towards", lambda where, _: routes.get(where[0], "127.0.1.1"))
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))],
    )
    assert listen_address("myself") == ("10.1.2.3", 0)


def test_unknown_master_is_an_error_that_names_it() -> None:
    with pytest.raises(RendezvousError, match=r"'no\.such\.host\.invalid'.*listen="):
        listen_address("no.such.host.invalid")


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets and namespaces are Linux's")
def test_host_identity_is_the_kernels_and_the_network_namespaces() -> None:
    identity = host_identity()
    assert identity.endswith(f"{os.stat('/proc/self/ns/net').st_ino:x}")
    child, ours = os.pipe()
    if os.fork() == 0:
        os.write(ours, address.host_identity.__wrapped__().encode())
        os._exit(0)
    os.wait()
    assert os.read(child, 4096).decode() == identity
    os.close(child)
    os.close(ours)
