"""A transport without sockets, with which a test decides the order of events.

Nothing moves by itself: a connection is made, and each frame, and each end of a connection, arrives when the
test says so. So a test can produce every order of events that sockets can. A network that decides by itself
when things move is derived from ``MemoryNetwork``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rpc.transport.base import CLOSED_BY_PEER, Accepted, Connection, ConnectionOwner, DirectConnection
from rpc.wire.frames import Frame, decode_one

__all__ = ["Attempt", "MemoryConnection", "MemoryNetwork", "MemoryTransport"]


class MemoryConnection(DirectConnection):
    """One end of a connection, at a worker's ``place``."""

    def __init__(self, description: str, network: MemoryNetwork, place: str) -> None:
        super().__init__(description)
        self.network = network
        self.place = place
        self.received_anything = False
        self.other: MemoryConnection = self
        self.inbox: deque[Frame | None] = deque()
        """Frames on their way here; None is the end of the connection."""
        self.started = False

    def start(self, owner: ConnectionOwner) -> None:
        super().start(owner)
        self.started = True

    def pass_on(self, frame: bytearray) -> None:
        self.network.send(self.other, decode_one(frame))

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self.open:
            self.network.send(self.other, None)
        super().close(reason)

    def deliver(self) -> None:
        """Deliver the next frame, or the end."""
        frame = self.inbox.popleft()
        if not self.open:
            return
        if frame is None:
            self.close(CLOSED_BY_PEER)
        else:
            self.received_anything = True
            self.owner.frames_received(self, [frame])


class Attempt:
    """An attempt of the worker at ``place`` to connect to ``address``; a call decides its outcome."""

    def __init__(
        self, network: MemoryNetwork, place: str, address: str, made: asyncio.Future[Connection]
    ) -> None:
        self.network = network
        self.place = place
        self.address = address
        self.made = made

    def __call__(self) -> None:
        """Let the listener accept, if there is one; otherwise refuse the connection."""
        self.network.attempts.remove(self)
        if self.made.done():
            return
        where = self.address.removeprefix("memory:")
        accept = self.network.listeners.get(where)
        if accept is None:
            self.made.set_exception(ConnectionRefusedError(111, "Connection refused"))
            return
        here = MemoryConnection(self.address, self.network, self.place)
        there = MemoryConnection("a peer in memory", self.network, where)
        here.other, there.other = there, here
        self.network.ends += [here, there]
        self.made.set_result(here)
        self.network.accept(accept, there)


class MemoryNetwork:
    """Everything that is in transit: attempts to connect, accepted connections, frames."""

    def __init__(self) -> None:
        self.listeners: dict[str, Accepted] = {}
        self.attempts: list[Attempt] = []
        self.ends: list[MemoryConnection] = []

    def events(self) -> list[Callable[[], None]]:
        """Return the possible next events, in a fixed order."""
        return [
            *self.attempts,
            *(end.deliver for end in self.ends if end.started and end.inbox),
        ]

    def send(self, end: MemoryConnection, frame: Frame | None) -> None:
        """Send something to an end; None is the end of the connection."""
        end.inbox.append(frame)

    def attempt(self, attempt: Attempt) -> None:
        """Begin an attempt to connect."""
        self.attempts.append(attempt)

    def accept(self, accept: Accepted, end: MemoryConnection) -> None:
        """Pass the listener its end of a connection that was made."""
        accept(end)


class MemoryTransport:
    """One worker's access to the network, from its ``place``."""

    scheme = "memory"

    def __init__(self, network: MemoryNetwork, place: str = "") -> None:
        self._network = network
        self._place = place

    def listen(self, host: str, port: int, accepted: Accepted) -> MemoryListener:
        """Listen under the name ``host``."""
        self._network.listeners[host] = accepted
        return MemoryListener(self._network, host)

    async def connect(self, address: str) -> Connection:
        """Connect as soon as the test allows it."""
        made: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._network.attempt(Attempt(self._network, self._place, address, made))
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
