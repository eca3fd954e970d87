"""Who is let in where a peer was told to come, and who is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory import fd_listener as door_module
from rpc.bulk.shared_memory.fd_listener import Door
from rpc.runtime.loop import LoopThread
from tests.support.streams import SOON, until
from tests.unit.rpc.bulk.shared_memory.ends import open_descriptors

Entered = SimpleQueue[tuple[socket.socket, int | None]]
OpenDoor = Callable[[], Door]


@pytest.fixture
def entered() -> Entered:
    return SimpleQueue()


@pytest.fixture
def open_door(loop: LoopThread, entered: Entered) -> Iterator[OpenDoor]:
    made: list[Door] = []

    def make() -> Door:
        door = loop.call(lambda: Door(loop.loop, lambda sock, descriptor: entered.put((sock, descriptor))))
        made.append(door)
        return door

    yield make
    for door in made:
        loop.call(door.close)


def come(door: Door, shown: bytes) -> socket.socket:
    sock = fd_channel.connect(door.name)
    fd_channel.send(sock, shown, sock.fileno())
    sock.settimeout(SOON)
    return sock


def is_turned_away(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_shows_the_token_enters_with_what_it_brings(open_door: OpenDoor, entered: Entered) -> None:
    door = open_door()
    with come(door, door.token):
        sock, descriptor = entered.get(timeout=SOON)
    assert descriptor is not None
    os.close(descriptor)
    sock.close()


def test_the_door_is_closed_behind_the_one_who_entered(open_door: OpenDoor, entered: Entered) -> None:
    door = open_door()
    with come(door, door.token):
        sock, descriptor = entered.get(timeout=SOON)
    sock.close()
    assert descriptor is not None
    os.close(descriptor)
    with pytest.raises(ConnectionRefusedError):
        fd_channel.connect(door.name)


def test_strangers_are_turned_away_and_what_they_bring_is_closed(
    open_door: OpenDoor, entered: Entered
) -> None:
    door = open_door()
    before = open_descriptors()
    for shown in (b"x", bytes(16), door.token[:-1], door.token + b"x", bytes(5000)):
        with come(door, shown) as sock:
            assert is_turned_away(sock)
    until(lambda: open_descriptors() == before)
    with come(door, door.token):
        sock, descriptor = entered.get(timeout=SOON)
    sock.close()
    assert descriptor is not None
    os.close(descriptor)


def test_those_who_show_nothing_keep_nobody_out(open_door: OpenDoor, entered: Entered) -> None:
    door = open_door()
    silent = [fd_channel.connect(door.name) for _ in range(5)]
    for each in silent:
        each.settimeout(SOON)
    with come(door, door.token):
        sock, descriptor = entered.get(timeout=SOON)
    assert all(map(is_turned_away, silent))
    for each in (*silent, sock):
        each.close()
    assert descriptor is not None
    os.close(descriptor)


def test_a_door_that_nobody_comes_to_closes(open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_OPEN_SECONDS", 0.01)
    before = open_descriptors()
    open_door()
    until(lambda: open_descriptors() == before)
