"""A worker's connection to itself: frames in memory of their own, and on which thread they are received."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rpc.group.loopback import Loopback
from rpc.runtime.loop import LoopThread
from rpc.transport.base import ConnectionClosed, ConnectionOwner
from rpc.wire.frames import Frame, Kind, encode_small
from tests.support.streams import until


class Owner(ConnectionOwner):
    def __init__(self) -> None:
        self.received: list[tuple[str, Frame]] = []
        self.lost: list[str] = []

    def take_inline(self, frames: list[Frame], *, keep: bool) -> None:
        if frames[0].kind != Kind.EXTENSION and "reference" not in frames[0].header:
            self.frames_received(None, frames)
            frames.clear()

    def frames_received(self, connection: Any, frames: list[Frame]) -> None:
        self.received += [(threading.current_thread().name, frame) for frame in frames]

    def connection_lost(self, connection: Any, reason: str) -> None:
        self.lost.append(reason)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def loopback(loop: LoopThread, owner: Owner) -> Loopback:
    made = Loopback(loop.loop)
    made.start(owner)
    return made


@pytest.mark.parametrize(
    ("kind", "header", "on_loop"),
    [
        (Kind.CALL, {}, False),
        (Kind.REPLY, {"autograd": 1}, False),
        (Kind.CALL, {"reference": 1}, True),
        (Kind.EXTENSION, {}, True),
    ],
)
def test_calls_are_received_on_the_senders_thread_unless_they_bring_something(
    loopback: Loopback, owner: Owner, kind: int, header: dict[str, Any], on_loop: bool
) -> None:
    loopback.send_small(encode_small(kind, 7, header, (b"pickle",)), 0)
    until(lambda: owner.received)
    ((thread, frame),) = owner.received
    assert (thread == "test-loop") is on_loop
    assert frame[:3] == (kind, 7, header)


def test_nothing_is_received_once_it_is_closed(loopback: Loopback, owner: Owner) -> None:
    loopback.close("the end")
    loopback.close("again")
    assert owner.lost == ["the end"]
    with pytest.raises(ConnectionClosed):
        loopback.send_small(encode_small(Kind.CALL, 1, {}, ()), 0)
