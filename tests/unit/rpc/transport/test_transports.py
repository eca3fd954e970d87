"""Ways to reach another process: both lead there, both say when nobody is there, neither lets others in."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport import tcp
from rpc.transport.base import Connection, Listener, Transport, TransportContext
from rpc.transport.registry import transports
from rpc.transport.tcp import TcpTransport
from tests.support.ports import reserved_port
from tests.support.streams import SOON, Recorder, send, until

__all__ = ["reserved_port"]


class Place:
    """Somewhere that listens; its visitors are noted and answered to."""

    def __init__(self, loop: LoopThread, transport: Transport, host: str, port: int = 0) -> None:
        self._loop = loop
        self.connections: list[Connection] = []
        self.owner = Recorder()
        self.arrived = threading.Event()
        self.listener: Listener = loop.call(transport.listen, host, port, self._accepted)

    def _accepted(self, connection: Connection) -> None:
        connection.start(self.owner)
        self.connections.append(connection)
        self.arrived.set()

    def close(self) -> None:
        self._loop.call(self.listener.close)
        for connection in self.connections:
            self._loop.call(connection.close, "end of the test")


MakePlace = Callable[..., Place]


@pytest.fixture
def place(loop: LoopThread) -> Iterator[MakePlace]:
    """Makes places, which are closed after the test."""
    made: list[Place] = []

    def make(scheme: str, host: str = "127.0.0.1", port: int = 0) -> Place:
        made.append(Place(loop, transports(TransportContext(loop.loop, 1 << 20))[scheme], host, port))
        return made[-1]

    yield make
    for each in made:
        each.close()


def connect(loop: LoopThread, address: str, owner: Recorder | None = None) -> Connection:
    """A started connection to a listener's address."""

    async def run() -> Connection:
        connection = await transports(TransportContext(loop.loop, 1 << 20))[
            address.partition(":")[0]
        ].connect(address)
        connection.start(owner or Recorder())
        return connection

    return loop.wait_for(run(), SOON)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("scheme", "host", "address"),
    [
        ("unix", "", "unix:@farcall-"),
        ("tcp", "127.0.0.1", "tcp:127.0.0.1:"),
        ("tcp", "localhost", "tcp:"),
        pytest.param(
            "tcp", "::1", "tcp:[::1]:", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
        ),
    ],
)
def test_frames_go_both_ways_between_who_listens_and_who_connects(
    loop: LoopThread, place: MakePlace, scheme: str, host: str, address: str
) -> None:
    there = place(scheme, host)
    assert there.listener.address.startswith(address)
    owner = Recorder()
    here = connect(loop, there.listener.address, owner)
    send(here, {"to": "there"})
    assert there.owner.wait_for(1)[0].header == {"to": "there"}
    send(there.connections[0], {"to": "here"})
    assert owner.wait_for(1)[0].header == {"to": "here"}
    assert here.description == there.listener.address
    expected = f"process {os.getpid()} on this host" if scheme == "unix" else host.replace("localhost", "")
    assert expected in there.connections[0].description
    loop.call(here.close, "done")
    assert there.owner.reason() == "the connection was closed by the other side"


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_where_nobody_listens_any_more_connecting_fails(
    loop: LoopThread, place: MakePlace, scheme: str
) -> None:
    there = place(scheme)
    there.close()
    there.close()
    with pytest.raises(ConnectionRefusedError):
        connect(loop, there.listener.address)


def test_a_tcp_port_can_be_named_and_taken_again_at_once(
    loop: LoopThread, place: MakePlace, reserved_port: int
) -> None:
    for _ in range(3):
        there = place("tcp", port=reserved_port)
        here = connect(loop, there.listener.address)
        assert there.arrived.wait(SOON)
        loop.call(there.connections[0].close, "this side first, so that its port lingers")
        there.close()
        loop.call(here.close, "done")
    place("tcp", port=reserved_port)
    with pytest.raises(OSError, match="in use"):
        place("tcp", port=reserved_port)


@pytest.mark.parametrize("who", ["listener", "connector"])
def test_processes_of_other_users_are_turned_away_on_both_sides(
    loop: LoopThread,
    place: MakePlace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    who: str,
) -> None:
    there = place("unix")
    me, somebody = os.geteuid(), os.geteuid() + 1
    asked = iter([somebody, me] if who == "connector" else [me, somebody, somebody])
    monkeypatch.setattr("rpc.transport.unix.os.geteuid", lambda: next(asked, me))
    if who == "connector":
        with pytest.raises(PermissionError, match=f"belongs to user {me}, not to user"):
            connect(loop, there.listener.address)
        return
    owner = Recorder()
    connect(loop, there.listener.address, owner)
    assert owner.reason()
    assert there.connections == []
    assert f"turned away a process of user {me} on unix:@farcall-" in caplog.text


def test_who_finds_the_queue_of_a_unix_listener_full_waits_until_it_is_accepted(loop: LoopThread) -> None:
    name = f"farcall-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen(0)
        listener.settimeout(SOON)
        waiting: list[Connection] = []
        full = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in full:
            each.setblocking(False)
        refused = 0
        for each in full:
            try:
                each.connect(b"\0" + name.encode())
            except BlockingIOError:
                refused += 1
        assert refused
        connecting = threading.Thread(target=lambda: waiting.append(connect(loop, f"unix:@{name}")))
        connecting.start()
        accepted = []
        while connecting.is_alive():
            if select.select([listener], [], [], 0.01)[0]:
                accepted.append(listener.accept()[0])
        loop.call(waiting[0].close, "done")
        for each in [*full, *accepted]:
            each.close()


def test_a_connection_that_breaks_while_it_is_accepted_is_dropped(
    loop: LoopThread, place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place("tcp")
    failures = iter([OSError(errno.EINVAL, "Invalid argument")])
    accepted = there.listener._accepted  # type: ignore[attr-defined]

    def failing(sock: socket.socket) -> None:
        for failure in failures:
            raise failure
        accepted(sock)

    monkeypatch.setattr(there.listener, "_accepted", failing)
    owner = Recorder()
    connect(loop, there.listener.address, owner)
    assert owner.reason()
    connect(loop, there.listener.address)
    until(lambda: len(there.connections) == 1)


# ---- a name with several addresses


def silent_address() -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose queue is full: who connects to it gets no answer."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    callers = []
    for _ in range(4):
        caller = socket.socket()
        caller.setblocking(False)
        caller.connect_ex(listener.getsockname())
        callers.append(caller)
    return listener, callers


def resolve_to(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    async def resolve(*_: object) -> list[tuple[int, Any]]:
        return [(socket.AF_INET, ("127.0.0.1", port)) for port in ports]

    monkeypatch.setattr(TcpTransport, "_resolve", resolve)


def port_of(place: Place) -> int:
    return int(place.listener.address.rpartition(":")[2])


def test_an_address_that_refuses_is_passed_over(
    loop: LoopThread, place: MakePlace, monkeypatch: pytest.MonkeyPatch, reserved_port: int
) -> None:
    there = place("tcp")
    resolve_to(monkeypatch, reserved_port, port_of(there))
    connection = connect(loop, "tcp:somewhere:1")
    assert there.arrived.wait(SOON)
    loop.call(connection.close, "end of the test")


def test_an_address_that_does_not_answer_is_passed_over(
    loop: LoopThread, place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place("tcp")
    listener, callers = silent_address()
    resolve_to(monkeypatch, listener.getsockname()[1], port_of(there))
    connection = connect(loop, "tcp:somewhere:1")
    assert there.arrived.wait(SOON)
    loop.call(connection.close, "end of the test")
    for each in (listener, *callers):
        each.close()


def test_an_attempt_that_succeeds_too_late_is_closed(
    loop: LoopThread, place: MakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place("tcp")
    monkeypatch.setattr(tcp, "_NEXT_ADDRESS_SECONDS", 0.0)
    resolve_to(monkeypatch, *[port_of(there)] * 5)
    for _ in range(10):
        connection = connect(loop, "tcp:somewhere:1")
        loop.call(connection.close, "end of the test")


def test_a_process_of_another_user_cannot_fill_the_log(
    loop: LoopThread,
    place: Callable[..., Place],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = place("unix")
    somebody = os.geteuid() + 1
    monkeypatch.setattr("rpc.transport.unix.os.geteuid", lambda: somebody)
    where = b"\0" + there.listener.address.removeprefix("unix:@").encode()
    for _ in range(40):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(SOON)
            stranger.connect(where)
            assert stranger.recv(1) == b""
    assert 20 <= caplog.text.count("turned away") < 40


def test_without_any_answer_the_first_address_says_why(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, reserved_port: int
) -> None:
    resolve_to(monkeypatch, reserved_port, reserved_port)
    with pytest.raises(ConnectionRefusedError):
        connect(loop, "tcp:somewhere:1")
