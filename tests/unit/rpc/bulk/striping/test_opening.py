"""How stripes come about: all of a set or none, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc.bulk.striping import opening
from rpc.bulk.striping.opening import Offers, connect_stripes
from rpc.errors import ProtocolError
from rpc.runtime.loop import LoopThread
from rpc.transport import Connection
from rpc.transport.tcp import TcpTransport
from rpc.wire.frames import Frame, Kind, encode_small
from tests.support.streams import SOON, until

PEER = 7
WELCOME = encode_small(Kind.WELCOME, 0, {}, ())

Answer = Callable[[Connection, Frame], None]


class Accepting:
    """The side that accepts: ``answer`` says what becomes of each stripe."""

    def __init__(self, loop: LoopThread, answer: Answer) -> None:
        self.reasons: list[str] = []
        self.connections: list[Connection] = []
        self._answer = answer
        self._loop = loop
        self.transport = TcpTransport(loop.loop, 1 << 20)
        self._listener = loop.call(self.transport.listen, "127.0.0.1", 0, self._accepted)

    def _accepted(self, connection: Connection) -> None:
        self.connections.append(connection)
        connection.start(self)

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        try:
            self._answer(connection, frames[0])
        except ProtocolError as error:
            connection.close(str(error))

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self.reasons.append(reason)

    def connect(self, token: bytes, count: int, patience: float = SOON) -> list[socket.socket]:
        """The other side."""
        under_way: set[Connection] = set()

        async def connect() -> list[socket.socket]:
            return await connect_stripes(
                lambda: self.transport.connect(self._listener.address), token, count, under_way
            )

        try:
            return self._loop.wait_for(connect(), patience)
        finally:
            until(lambda: not under_way)

    def close(self) -> None:
        self._loop.call(self._listener.close)
        for connection in self.connections:
            self._loop.call(connection.close, "end of the test")


@pytest.fixture
def accepting(loop: LoopThread) -> Iterator[Callable[[Answer], Accepting]]:
    made: list[Accepting] = []

    def make(answer: Answer) -> Accepting:
        made.append(Accepting(loop, answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


def by(offers: Offers) -> Answer:
    return lambda connection, frame: offers.stripe_came(connection, frame.header)


def test_all_stripes_of_an_offer_are_opened_and_carry_what_they_are_given(
    accepting: Callable[[Answer], Accepting],
) -> None:
    offers = Offers()
    here = accepting(by(offers)).connect(offers.make(PEER, 5), 3)
    there = offers.take(PEER, 3)
    assert len(here) == len(there) == 3
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert not one.getblocking()
        for sock in (one, other):
            sock.settimeout(SOON)
        one.sendall(bytes([number]) * 10)
        other.sendall(bytes([100 + number]) * 10)
        assert other.recv(100) == bytes([number]) * 10
        assert one.recv(100) == bytes([100 + number]) * 10
    for sock in (*here, *there):
        sock.close()
    assert PEER not in offers


BAD_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"number": 0}, "a malformed stripe"),
    "no number": ({"token": bytes(16)}, "a malformed stripe"),
    "a text for a token": ({"token": "x", "number": 0}, "a malformed stripe"),
    "the wrong token": ({"token": bytes(16), "number": 0}, "belongs to no connection, or comes too late"),
    "an empty token": ({"token": b"", "number": 0}, "belongs to no connection, or comes too late"),
}


@pytest.mark.parametrize(("header", "text"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_others_are_refused(
    accepting: Callable[[Answer], Accepting], header: dict[str, Any], text: str
) -> None:
    offers = Offers()
    offers.make(PEER, 1)
    accepting_side = accepting(lambda connection, frame: offers.stripe_came(connection, header))
    with pytest.raises(ConnectionError, match="a stripe was not opened: the connection was closed"):
        accepting_side.connect(b"", 1)
    assert text in accepting_side.reasons[0]
    assert offers.sockets() == []


@pytest.mark.parametrize("number", [-1, 2, 1])
def test_a_stripe_has_a_number_of_its_own(accepting: Callable[[Answer], Accepting], number: int) -> None:
    offers = Offers()
    token = offers.make(PEER, 2)
    came: list[int] = []

    def answer(connection: Connection, frame: Frame) -> None:
        came.append(frame.header["number"])
        said = 1 if len(came) == 1 else number
        offers.stripe_came(connection, {"token": token, "number": said})

    with pytest.raises(ConnectionError):
        accepting(answer).connect(token, 2)
    assert len(offers.sockets()) == 1
    offers.drop(PEER)
    assert offers.sockets() == []


def test_a_late_stripe_is_refused(accepting: Callable[[Answer], Accepting]) -> None:
    offers = Offers()
    accepting_side = accepting(by(offers))
    token = offers.make(PEER, 2)
    (here,) = accepting_side.connect(token, 1)
    (there,) = offers.take(PEER, 1)
    with pytest.raises(ConnectionError):
        accepting_side.connect(token, 1)
    here.close()
    there.close()


@pytest.mark.parametrize("count", [0, 2, 3, 1 << 40])
def test_ready_means_all_that_are_there(accepting: Callable[[Answer], Accepting], count: int) -> None:
    offers = Offers()
    (here,) = accepting(by(offers)).connect(offers.make(PEER, 3), 1)
    with pytest.raises(ProtocolError, match="ready which are not there"):
        offers.take(PEER, count)
    offers.drop(PEER)
    with pytest.raises(ProtocolError, match="ready which are not there"):
        offers.take(PEER, 1)
    offers.make(PEER, 3)
    with pytest.raises(ProtocolError, match="ready which are not there"):
        offers.take(PEER, 0)
    here.close()


def test_if_one_cannot_be_opened_none_is(accepting: Callable[[Answer], Accepting]) -> None:
    offers = Offers()
    token = offers.make(PEER, 2)
    with pytest.raises(ConnectionError, match="was not opened"):
        accepting(by(offers)).connect(token, 3)
    (first, second) = offers.sockets()
    for sock in (first, second):
        sock.settimeout(SOON)
        assert sock.recv(1) == b""
    offers.drop(PEER)


def test_who_is_refused_learns_why(accepting: Callable[[Answer], Accepting]) -> None:
    def answer(connection: Connection, frame: Frame) -> None:
        connection.send_small(encode_small(Kind.REFUSED, 0, {"reason": "not today"}, ()), 0)

    with pytest.raises(ConnectionError, match="not today"):
        accepting(answer).connect(b"", 1)


def test_another_answer_is_none(accepting: Callable[[Answer], Accepting]) -> None:
    def answer(connection: Connection, frame: Frame) -> None:
        connection.send_small(encode_small(Kind.HELLO, 0, {}, ()), 0)

    with pytest.raises(ConnectionError, match="expected welcome or refused, got a frame of kind 1"):
        accepting(answer).connect(b"", 1)


def test_nothing_may_follow_the_welcome(accepting: Callable[[Answer], Accepting]) -> None:
    def answer(connection: Connection, frame: Frame) -> None:
        connection.send_small(WELCOME + b"and more", 0)

    with pytest.raises(ProtocolError, match="more has come"):
        accepting(answer).connect(b"", 1)


def test_who_does_not_answer_is_not_waited_for_long(
    accepting: Callable[[Answer], Accepting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_OPEN_SECONDS", 0.05)
    accepting_side = accepting(lambda connection, frame: None)
    with pytest.raises(TimeoutError):
        accepting_side.connect(b"", 1)
    until(lambda: accepting_side.reasons)


def test_who_gives_up_leaves_nothing(accepting: Callable[[Answer], Accepting]) -> None:
    asked: list[Frame] = []
    accepting_side = accepting(lambda connection, frame: asked.append(frame))
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        accepting_side.connect(b"", 1, patience=0.05)
    until(lambda: accepting_side.reasons)
