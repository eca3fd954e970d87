"""Connections that are made again and break again at once: with growing pauses, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rpc.group import connections
from rpc.group.link import LinkState
from rpc.testing.memory_transport import MemoryNetwork, MemoryTransport
from rpc.transport.base import Transport
from tests.support.nodes import Node


class SteadyTime:
    """The time of a running loop as its parts see it: it goes on when a pause is over, and only then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = 100.0
        self.pauses: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        if seconds < connections.STRANGER_SECONDS:  # else a limit that is never reached
            self.pauses.append((self.now + seconds, lambda: callback(*arguments)))
        return asyncio.Handle(callback, arguments, self._loop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def pass_pause(self) -> None:
        """Let the next pause go by."""
        first = min(self.pauses, key=lambda pause: pause[0])
        self.pauses.remove(first)
        self.now = first[0]
        first[1]()


class Pair:
    """Two workers in memory, of which the left one has something to send."""

    def __init__(self) -> None:
        loop: Any = SteadyTime(asyncio.get_running_loop())
        self.time: SteadyTime = loop
        self.network = MemoryNetwork()
        self.nodes = [
            Node(
                name,
                index,
                100 + index,
                loop,
                lambda function, *arguments: function(*arguments),
                reach={"memory": _as_transport(MemoryTransport(self.network))},
                listen_on=name,
            )
            for index, name in enumerate(("left", "right"))
        ]
        self.left, self.right = self.nodes
        self.left.form_group(self.right.member)
        self.right.form_group(self.left.member)
        for node in self.nodes:
            node.connections.reconnect_seconds = 30.0
        self.peer = self.left.peer_for(self.right.member)

    async def settle(self, until: Callable[[], object]) -> None:
        """Let everything arrive until something is so."""
        while True:
            for _ in range(4):
                await asyncio.sleep(0)
            events = self.network.events()
            if until() or not events:
                return
            events[0]()

    async def connect(self) -> bool:
        """Let handshakes go on until the left one is connected; whether it is."""
        await self.settle(lambda: self.peer.link.state is LinkState.ESTABLISHED)
        return self.peer.link.state is LinkState.ESTABLISHED

    def cut(self) -> None:
        """Both notice at once that their connection is broken, and nothing is on its way any more."""
        assert self.peer.connection is not None
        ends = [end for end in self.network.ends if end.open]
        for end in ends:
            end.inbox.clear()
        for end in ends:
            end.close("the test has cut it")
            end.other.inbox.clear()


def _as_transport(transport: MemoryTransport) -> Transport:
    return transport


async def nothing() -> None:
    pass


async def flap(pair: Pair, times: int, between: Callable[[], Awaitable[object]] = nothing) -> list[float]:
    """Break each connection as soon as it is made; returns the pauses that the left one has made."""
    pair.left.send(pair.right, 1)
    passed: list[float] = []
    for _ in range(times):
        assert await pair.connect()
        await between()
        pair.cut()
        began = pair.time.now
        while pair.peer.link.paused:
            pair.time.pass_pause()
        if pair.time.now > began:
            passed.append(pair.time.now - began)
        if pair.left.gone:
            break
    return passed


def test_who_breaks_each_connection_at_once_is_dialled_after_growing_pauses_and_lost_in_the_end() -> None:
    async def run() -> None:
        pair = Pair()
        passed = await flap(pair, 200)
        assert passed[:4] == pytest.approx([0.005, 0.01, 0.02, 0.04])
        assert max(passed) == pytest.approx(2.0)
        assert len(passed) < 40
        ((name, reason),) = pair.left.gone
        assert name == "right"
        assert "as soon as it was connected" in reason
        assert 28 < sum(passed) < 33

    asyncio.run(run())


def test_what_is_sent_meanwhile_does_not_cut_a_pause_short() -> None:
    async def run() -> None:
        pair = Pair()
        await flap(pair, 1)
        assert await pair.connect()
        pair.cut()
        assert pair.peer.link.paused
        attempts = len(pair.network.attempts)
        for number in range(5):
            pair.left.send(pair.right, number)
            await asyncio.sleep(0)
        assert len(pair.network.attempts) == attempts

    asyncio.run(run())


def test_a_connection_over_which_something_came_is_made_again_at_once() -> None:
    async def run() -> None:
        pair = Pair()

        async def take_in() -> None:
            count = len(pair.left.received)
            pair.right.send(pair.left, 7)
            await pair.settle(lambda: len(pair.left.received) > count)
            pair.peer.session.take_in()  # as the dispatcher counts

        assert await flap(pair, 50, take_in) == []
        assert pair.left.gone == []

    asyncio.run(run())
