"""Which processes are accepted at the socket for a peer's memory, and which are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory.fd_channel import FdListener
from rpc.runtime.loop import LoopThread
from tests.support.streams import SOON, until
from tests.unit.rpc.bulk.shared_memory.ends import open_descriptors

Entered = SimpleQueue[tuple[socket.socket, int | None]]
OpenListener = Callable[[], FdListener]


@pytest.fixture
def entered() -> Entered:
    return SimpleQueue()


@pytest.fixture
def open_listener(loop: LoopThread, entered: Entered) -> Iterator[OpenListener]:
    made: list[FdListener] = []

    def make() -> FdListener:
        listener = loop.call(
            lambda: FdListener(loop.loop, lambda sock, descriptor: entered.put((sock, descriptor)))
        )
        made.append(listener)
        return listener

    yield make
    for listener in made:
        loop.call(listener.close)


def come(listener: FdListener, shown: bytes) -> socket.socket:
    sock = fd_channel.connect(listener.name)
    fd_channel.send(sock, shown, sock.fileno())
    sock.settimeout(SOON)
    return sock


def is_turned_away(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_nobody_enters_behind_the_one_who_entered(open_listener: OpenListener, entered: Entered) -> None:
    listener = open_listener()
    with come(listener, listener.token):
        sock, descriptor = entered.get(timeout=SOON)
    sock.close()
    assert descriptor is not None
    os.close(descriptor)
    with pytest.raises(ConnectionRefusedError):
        fd_channel.connect(listener.name)


def test_strangers_are_turned_away_and_what_they_bring_is_closed(
    open_listener: OpenListener, entered: Entered
) -> None:
    listener = open_listener()
    before = open_descriptors()
    for shown in (b"x", bytes(16), listener.token[:-1], listener.token + b"x", bytes(5000)):
        with come(listener, shown) as sock:
            assert is_turned_away(sock)
    until(lambda: open_descriptors() == before)
    with come(listener, listener.token):
        sock, descriptor = entered.get(timeout=SOON)
    sock.close()
    assert descriptor is not None
    os.close(descriptor)


def test_those_who_show_nothing_keep_nobody_out(open_listener: OpenListener, entered: Entered) -> None:
    listener = open_listener()
    silent = [fd_channel.connect(listener.name) for _ in range(5)]
    for each in silent:
        each.settimeout(SOON)
    with come(listener, listener.token):
        sock, descriptor = entered.get(timeout=SOON)
    assert all(map(is_turned_away, silent))
    for each in (*silent, sock):
        each.close()
    assert descriptor is not None
    os.close(descriptor)


def test_a_listener_that_nobody_comes_to_closes(
    open_listener: OpenListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_channel, "_OPEN_SECONDS", 0.01)
    before = open_descriptors()
    open_listener()
    until(lambda: open_descriptors() == before)
