"""Two workers reduced to their shared memory, on one loop that only turns when it is told to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind, encode_small
from tests.support.frames import LIMIT, feed, greeted

__all__ = ["Side", "Sides"]

_TURNS = 20
"""More than anything here takes that is said, answered and done."""


class Side:
    """One of the two, as an agent and as the peer of the other one."""

    is_self = False
    member: Any = SimpleNamespace(max_message_bytes=LIMIT)
    lost: str | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, incarnation: int) -> None:
        self.loop = loop
        self.incarnation = incarnation
        self.name = f"worker{incarnation}"
        self.near = True
        self.heard: list[str] = []
        self.received: list[bytes] = []
        self.other: Side

    def join(self, other: Side, **options: Any) -> None:
        self.other = other
        self.shared: Any = SharedMemory(
            self.loop,
            self.loop.call_soon,
            lambda _, reason: self.heard.append(reason),
            **{"bound": LIMIT, "max_message_bytes": LIMIT} | options,
        )

    def send(self, data: bytes) -> bool:
        """Send a message; whether it went through a segment."""
        payload = Payload({}, [b"pickle", memoryview(data)])
        sent: bool = self.shared.send(self.other, Kind.CALL, 1, payload, 0.0)
        return sent

    def say(self, **header: Any) -> None:
        """Say something about shared memory to the other one."""
        self.other.send_small(encode_small(Kind.SEGMENTS, 0, header, ()), 0.0)

    def send_small(self, frame: bytes, _: float, *, coalesce: bool = False) -> None:
        """As its peer: say something to it."""
        self.loop.call_soon(self._hear, frame)

    def _hear(self, data: bytes) -> None:
        frame: Frame
        (frame,) = feed(greeted(), data)
        if frame.kind == Kind.SEGMENTS:
            self.heard += frame.header
            self.shared.received(self.other, frame)
        else:
            self.received.append(bytes(self.shared.unwrap(self.other, frame).buffers[1]))


class Sides:
    """Both of them: ``here`` sends, ``there`` receives. Options are the receiver's."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.here, self.there = Side(self.loop, 1), Side(self.loop, 2)
        self.here.join(self.there)
        self.there.join(self.here, **options)

    def turn(self) -> None:
        """Let the loop do what there is to do."""
        for _ in range(_TURNS):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def close(self) -> None:
        sides: list[Any] = [self.here, self.there]
        for side in sides:
            side.shared.close()
        self.loop.close()
        for side in sides:
            side.__dict__.clear()  # there are cycles, and nothing is to wait for their collection
