"""How two begin to have stripes, whatever several threads send meanwhile."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from rpc.agent.agent import Agent
from rpc.bulk.striping import exchange
from rpc.bulk.striping.exchange import STRIPED_BYTES, Striping
from rpc.group.peer import Peer
from rpc.transport import Connection
from rpc.wire.frames import Frame, Kind
from tests.support.frames import feed, greeted
from tests.support.streams import connected_sockets
from tests.unit.rpc.bulk.shared_memory.meanwhile import meanwhile
from tests.unit.rpc.bulk.striping.ends import LIMIT, large

_COUNT = 2
_TURNS = 5


class Accepting:
    """The side that accepts stripes, on a loop that only turns when it is told to; its peer is the test's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._there: list[socket.socket] = []
        self.said: list[dict[str, Any]] = []
        peer = SimpleNamespace(
            incarnation=2,
            name="peer",
            member=SimpleNamespace(max_message_bytes=LIMIT),
            connected=True,
            connection=SimpleNamespace(over_network=True, direct=None),
            lost=None,
            send_small=self._hear,
        )
        self._peer = cast("Peer", peer)
        agent = SimpleNamespace(
            loop=self._loop,
            mailbox=SimpleNamespace(call=self._loop.call_soon),
            connections=SimpleNamespace(has_dialled=lambda _: False),
            options=SimpleNamespace(send_queue_bytes=LIMIT),
            peer_by_incarnation=lambda _: peer,
        )
        self._exchange = Striping(cast("Agent", agent), _COUNT, LIMIT)

    def _hear(self, data: bytes, _: float) -> None:
        (frame,) = feed(greeted(), data)
        if frame.kind == Kind.STRIPES:
            self.said.append(frame.header)

    def send(self) -> bool:
        """Send something large; whether it went over stripes."""
        return self._exchange.send(self._peer, *large(1, 2 * STRIPED_BYTES), aliased=False, wait=0.0)

    def be_told(self, **header: Any) -> None:
        """The peer says something about stripes."""
        self._exchange.received(self._peer, Frame(Kind.STRIPES, 0, header, []))

    def have_stripes_opened(self) -> None:
        """The peer asks for stripes and opens them."""
        self.be_told(ask=_COUNT)
        _, token = self.said[-1]["offer"]
        for number in range(_COUNT):
            here, there = connected_sockets("unix")
            here.setblocking(False)
            self._there.append(there)
            connection = SimpleNamespace(send=lambda *_, **__: None, detach=lambda here=here: here)
            self._exchange.stripe_came(cast("Connection", connection), {"token": token, "number": number})
        self.be_told(ready=_COUNT)

    def turn(self) -> None:
        """Let the loop do what there is to do."""
        for _ in range(_TURNS):
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    def close(self) -> None:
        self._exchange.close()
        self._loop.close()
        for sock in self._there:
            sock.close()


def sides_at_each_line_of_a_first_send(happens: str) -> Iterator[Accepting]:
    """One for each line of the exchange that sending runs, after its method ``happens`` ran before it."""
    line = 0
    ran = True
    while ran:
        line += 1
        side = Accepting()
        ran = meanwhile(line, functools.partial(getattr(side, happens)), side.send, exchange)
        if ran:
            yield side
        side.close()
    assert line > 5


def test_stripes_that_the_peer_opens_while_a_thread_sends_first_are_used() -> None:
    for side in sides_at_each_line_of_a_first_send("have_stripes_opened"):
        side.turn()
        assert side.send()


def test_two_threads_that_send_first_make_one_offer() -> None:
    for side in sides_at_each_line_of_a_first_send("send"):
        side.turn()
        assert [list(header) for header in side.said] == [["offer"]]
