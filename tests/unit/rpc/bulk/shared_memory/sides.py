"""Two workers reduced to their segments, on one loop that only turns when it is told to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from rpc.agent.agent import Agent
from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.group.peer import Peer
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind
from tests.support.frames import LIMIT, feed, greeted

__all__ = ["Side", "Sides"]

_TURNS = 20
"""More than anything here takes that is said, answered and done."""


class Side:
    """One of the two, as an agent and as the peer of the other one."""

    is_self = False

    def __init__(self, loop: asyncio.AbstractEventLoop, incarnation: int) -> None:
        self.loop = loop
        self.incarnation = incarnation
        self.name = f"worker{incarnation}"
        self.lost: list[str] = []
        self.heard: list[Frame] = []
        self.received: list[bytes] = []
        self.other: Side
        member = SimpleNamespace(host="host")
        agent = SimpleNamespace(
            loop=loop,
            mailbox=SimpleNamespace(call=loop.call_soon),
            view=SimpleNamespace(me=member),
            connections=SimpleNamespace(lose=lambda _, reason: self.lost.append(reason)),
            peer_by_incarnation=lambda _: self.other,
            frames_received=self._frames_received,
        )
        self.member = member
        self.exchange = SharedMemory(cast("Agent", agent), LIMIT, LIMIT)

    def send(self, data: bytes) -> bool:
        """Send a message; whether it went through a segment."""
        payload = Payload({}, [b"pickle", memoryview(data)])
        return self.exchange.send(cast("Peer", self.other), Kind.CALL, 1, payload, 0.0)

    def send_small(self, frame: bytes, _: float) -> None:
        """As its peer: say something to it."""
        self.loop.call_soon(self._hear, frame)

    def _hear(self, data: bytes) -> None:
        (frame,) = feed(greeted(), data)
        self.heard.append(frame)
        take = self.exchange.received if frame.kind == Kind.SEGMENTS else self.exchange.message_received
        take(cast("Peer", self.other), frame)

    def _frames_received(self, _: object, frames: list[Frame]) -> None:
        self.received += [bytes(frame.buffers[1]) for frame in frames]

    def asked(self) -> int:
        """How often it was asked for segments."""
        return sum(frame.kind == Kind.SEGMENTS and "ask" in frame.header for frame in self.heard)


class Sides:
    """Both of them: ``here`` sends, ``there`` receives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.here, self.there = Side(self._loop, 1), Side(self._loop, 2)
        self.here.other, self.there.other = self.there, self.here

    def turn(self) -> None:
        """Let the loop do what there is to do."""
        for _ in range(_TURNS):
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    def close(self) -> None:
        for side in (self.here, self.there):
            side.exchange.close()
        self._loop.close()
        sides: list[Any] = [self.here, self.there]
        for side in sides:
            side.__dict__.clear()  # there are cycles, and nothing is to wait for their collection
