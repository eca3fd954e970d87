"""How stripes come about: the side that made the connection connects to the other's listener once more.

A stripe begins as every connection does. Then, in the place of a hello, it says a token that the accepting
side has drawn for this purpose and told the other on the connection that the two have already: so it belongs
to that very connection, and to these two incarnations. It says nothing more until it is welcome, and then
only chunks. The accepting side sends nothing until all stripes of a set are there.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.group.handshake import legible, parse_refusal
from rpc.transport import Connection
from rpc.wire.frames import Frame, Kind, encode, encode_small

__all__ = ["TOKEN_BYTES", "Offers", "connect_stripes"]

TOKEN_BYTES: Final = 16
_OPEN_SECONDS: Final = 20.0
"""How long all stripes to one peer may take to connect and to be welcome."""


class _Offer:
    """Stripes that a peer may open."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.sockets: dict[int, socket.socket] = {}


class Offers:
    """The accepting side: which stripes are expected. On the loop's thread."""

    def __init__(self) -> None:
        self._offers: dict[int, _Offer] = {}

    def __contains__(self, incarnation: int) -> bool:
        return incarnation in self._offers

    def make(self, incarnation: int, count: int) -> bytes:
        """Let a peer open up to ``count`` stripes; returns the token that they have to say."""
        offer = self._offers[incarnation] = _Offer(count)
        return offer.token

    def stripe_came(self, connection: Connection, header: dict[str, Any]) -> None:
        """Somebody has connected and says to be a stripe: take the socket over, if that is true.

        Raises:
            ProtocolError: it is not.
        """
        token, number = header.get("token"), header.get("number")
        if not isinstance(token, bytes) or not isinstance(number, int):
            raise ProtocolError("a malformed stripe")
        offers = [each for each in self._offers.values() if secrets.compare_digest(each.token, token)]
        if not offers:
            raise ProtocolError("a stripe that belongs to no connection, or comes too late")
        (offer,) = offers
        if not 0 <= number < offer.count or number in offer.sockets:
            raise ProtocolError(
                f"a stripe of the number {number!r}, where up to {offer.count} are expected once"
            )
        buffers, size = encode(Kind.WELCOME, 0, {}, ())
        connection.send(buffers, size, wait=False)
        offer.sockets[number] = connection.detach()

    def take(self, incarnation: int, count: int) -> list[socket.socket]:
        """The stripes of a peer, which says that all are open.

        Raises:
            ProtocolError: they are not.
        """
        offer = self._offers.get(incarnation)
        there = offer.sockets if offer is not None else {}
        if offer is None or not 0 < count == len(there) == max(there) + 1:
            raise ProtocolError("it says that stripes are ready which are not there")
        del self._offers[incarnation]
        return [offer.sockets[number] for number in range(count)]

    def drop(self, incarnation: int) -> None:
        """Expect no stripes from a peer any more, and close those that are there."""
        offer = self._offers.pop(incarnation, None)
        for sock in offer.sockets.values() if offer is not None else ():
            sock.close()

    def sockets(self) -> list[socket.socket]:
        """All that are there."""
        return [sock for offer in self._offers.values() for sock in offer.sockets.values()]


class _Greeting:
    """Owner of a connection that is to become a stripe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answered: asyncio.Future[None] = loop.create_future()

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        frame = frames[0]
        if frame.kind == Kind.WELCOME and len(frames) == 1 and not self.answered.done():
            self.answered.set_result(None)
        elif frame.kind == Kind.REFUSED:
            connection.close(parse_refusal(frame.header).reason)
        else:
            connection.close(f"expected welcome or refused, got a frame of kind {frame.kind}")

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if not self.answered.done():
            self.answered.set_exception(ConnectionError(f"a stripe was not opened: {legible(reason)}"))


async def connect_stripes(
    connect: Callable[[], Awaitable[Connection]], token: bytes, count: int, under_way: set[Connection]
) -> list[socket.socket]:
    """The connecting side: open stripes; returns their sockets.

    Args:
        connect: makes one more connection to the peer, not yet started.
        token: what the peer has told.
        count: how many.
        under_way: where connections are put that are open and not yet among the result.

    Raises:
        OSError: at least one cannot be opened, or not in time; the others are closed.
        ConnectionClosed: one is gone already; likewise.
        ProtocolError: the peer says what it must not; likewise.
    """
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    sockets: list[socket.socket] = []
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            for number in range(count):
                connection = await connect()
                opened.append(connection)
                under_way.add(connection)
                greeting = _Greeting(loop)
                connection.start(greeting)
                hello = encode_small(Kind.STRIPE, 0, {"token": token, "number": number}, ())
                connection.send_small(hello, False)
                await greeting.answered
        sockets.extend(connection.detach() for connection in opened)
        return sockets
    except BaseException:
        for connection in opened:
            connection.close("not all stripes can be opened")
        for sock in sockets:
            sock.close()
        raise
    finally:
        under_way.difference_update(opened)
