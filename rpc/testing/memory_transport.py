"""A transport without sockets, where a test decides what happens next.

Nothing moves by itself: a connection is made when the test lets it, and each frame, and each end, arrives
when the test says. So every order of events that sockets could bring about can be brought about on purpose.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rpc.transport.base import (
    CLOSED_BY_PEER,
    INFINITE,
    Accepted,
    Connection,
    ConnectionClosed,
    ConnectionOwner,
)
from rpc.transport.inline_read.reader import InlineReader
from rpc.wire.frames import PREAMBLE, Frame, decode_one

__all__ = ["MemoryConnection", "MemoryNetwork", "MemoryTransport"]


class MemoryConnection:
    """One end of a connection."""

    owner: ConnectionOwner
    reader: InlineReader | None = None
    over_network = False

    def __init__(self, description: str) -> None:
        self.description = description
        self.received_anything = False
        self.other: MemoryConnection = self
        self.inbox: deque[Frame | None] = deque()
        """What is on its way here; None is the end."""
        self.open = True
        self.started = False

    def start(self, owner: ConnectionOwner) -> None:
        self.owner = owner
        self.started = True

    def set_frame_limits(self, received: int, sent: int) -> None:
        pass

    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        self.send_small(b"".join(buffers), wait)

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False) -> None:
        if not self.open:
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        assert frame != PREAMBLE
        self.other.inbox.append(decode_one(bytearray(frame)))

    def flush(self) -> None:
        pass

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self.open:
            self.open = False
            self.other.inbox.append(None)
            self.owner.connection_lost(self, reason)

    def abandon(self) -> None:
        self.open = False

    def deliver(self) -> None:
        """Let the next thing arrive."""
        frame = self.inbox.popleft()
        if not self.open:
            return
        if frame is None:
            self.close(CLOSED_BY_PEER)
        else:
            self.received_anything = True
            self.owner.frames_received(self, [frame])


class MemoryNetwork:
    """All that is on its way: attempts to connect, accepted connections, frames."""

    def __init__(self) -> None:
        self.listeners: dict[str, Accepted] = {}
        self.attempts: list[Callable[[], None]] = []
        self.ends: list[MemoryConnection] = []

    def events(self) -> list[Callable[[], None]]:
        """What may happen next, in a fixed order."""
        return [
            *self.attempts,
            *(end.deliver for end in self.ends if end.started and end.inbox),
        ]


class MemoryTransport:
    """One worker's way into the network."""

    scheme = "memory"

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def listen(self, host: str, port: int, accepted: Accepted) -> MemoryListener:
        """Listen under the name ``host``."""
        self._network.listeners[host] = accepted
        return MemoryListener(self._network, host)

    async def connect(self, address: str) -> Connection:
        """Connect as soon as the test lets it."""
        network = self._network
        made: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def attempt() -> None:
            network.attempts.remove(attempt)
            accept = network.listeners.get(address.removeprefix("memory:"))
            if made.done():
                return
            if accept is None:
                made.set_exception(ConnectionRefusedError(111, "Connection refused"))
                return
            here, there = MemoryConnection(address), MemoryConnection("a peer in memory")
            here.other, there.other = there, here
            network.ends += [here, there]
            made.set_result(here)
            accept(there)

        network.attempts.append(attempt)
        return await made


class MemoryListener:
    """A name under which a worker can be reached."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.address = f"memory:{name}"
        self._network = network
        self._name = name

    def close(self) -> None:
        self._network.listeners.pop(self._name, None)

    def abandon(self) -> None:
        self.close()
