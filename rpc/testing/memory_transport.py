"""A transport without sockets, where a test decides what happens next.

Nothing moves by itself: a connection is made when the test lets it, and each frame, and each end, arrives
when the test says. So every order of events that sockets could bring about can be brought about on purpose.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rpc.transport.base import CLOSED_BY_PEER, Accepted, Connection, ConnectionOwner, DirectConnection
from rpc.wire.frames import Frame, decode_one

__all__ = ["MemoryConnection", "MemoryNetwork", "MemoryTransport"]


class MemoryConnection(DirectConnection):
    """One end of a connection."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.received_anything = False
        self.other: MemoryConnection = self
        self.inbox: deque[Frame | None] = deque()
        """What is on its way here; None is the end."""
        self.started = False

    def start(self, owner: ConnectionOwner) -> None:
        super().start(owner)
        self.started = True

    def pass_on(self, frame: bytearray) -> None:
        self.other.inbox.append(decode_one(frame))

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self.open:
            self.other.inbox.append(None)
        super().close(reason)

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
