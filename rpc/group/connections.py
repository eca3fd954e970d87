"""Connections to the other workers: listening, connecting, noticing that one is gone.

Everything here runs on the loop's thread. A connection is owned by a ``Greeting`` until both sides know each
other, and by an ``_Established`` from then on, which passes its frames to the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.group.admission import CROSSED, judge
from rpc.group.connection_state import CONNECTING, Event
from rpc.group.dialling import Unreachable, dial
from rpc.group.greeting import Greeting
from rpc.group.handshake import Authenticator, Hello, Refusal, legible
from rpc.group.loopback import Loopback
from rpc.group.membership import Membership
from rpc.group.peer import Peer
from rpc.group.ports import ConnectionEvents
from rpc.transport.base import (
    CLOSED_BY_PEER,
    Connection,
    ConnectionClosed,
    Listener,
    SilentOwner,
    Transport,
)
from rpc.wire.frames import Frame, Kind, encode

__all__ = ["CRASHED", "FAREWELL_SECONDS", "SMALL_FRAME_BYTES", "Connections"]

logger = logging.getLogger(__name__)

SMALL_FRAME_BYTES: Final = 128 << 10
"""Frames up to this are accepted whatever the limit for messages: nobody checks them before sending."""

CONNECT_SECONDS: Final = 20.0
"""How long one address may take to answer, and how long a peer may take to shake hands."""

FAREWELL_SECONDS: Final = 5.0
"""How long what is queued for peers may take to be sent when this worker leaves."""

CRASHED: Final = "its program was ended by an exception"
"""What a worker says first in its goodbye, if so: the others' logs should show it."""


class Connections:
    """All connections of one agent.

    Args:
        loop: the agent's loop.
        transports: by scheme, best first.
        events: told of frames and of workers that are gone.
        max_frame_bytes: the largest frame that a peer may send.
        authenticator: has other workers prove that they belong to the job; None to ask nothing.

    Attributes:
        connect_seconds, farewell_seconds: see ``CONNECT_SECONDS`` and ``FAREWELL_SECONDS``.
        group: the key of the group, once it is formed.
        lane_came: takes over a connection that says to be a lane, or raises ``ProtocolError``.
        closed: this worker leaves, or has left.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transports: dict[str, Transport],
        events: ConnectionEvents,
        max_frame_bytes: int,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.connect_seconds = CONNECT_SECONDS
        self.farewell_seconds = FAREWELL_SECONDS
        self.group = ""
        self.lane_came: Callable[[Connection, dict[str, Any]], None] | None = None
        self.closed = False
        self._loop = loop
        self._transports = transports
        self._events = events
        self._max_frame_bytes = max_frame_bytes
        self._authenticator = authenticator
        self._view: Membership | None = None
        self._listeners: list[Listener] = []
        self._greetings: dict[Greeting, None] = {}  # in the order in which they began
        self._dialling: set[asyncio.Task[None]] = set()

    # ---- listening

    def listen(self, host: str, port: int) -> list[str]:
        """Listen with every transport; returns the addresses, best first."""
        try:
            for transport in self._transports.values():
                self._listeners.append(transport.listen(host, port, self._accepted))
        except BaseException:
            self.stop_listening()
            raise
        return [listener.address for listener in self._listeners]

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def join_group(self, view: Membership, group: str) -> None:
        """The group is formed: from now on hellos can be judged."""
        self._view, self.group = view, group
        for greeting in list(self._greetings):
            if greeting.hello is not None:
                self.hello_received(greeting)

    def _accepted(self, connection: Connection) -> None:
        self._greet(connection, None)

    def _greet(self, connection: Connection, peer: Peer | None) -> Greeting:
        greeting = Greeting(self._loop, self, connection, peer, self.connect_seconds, self._authenticator)
        self._greetings[greeting] = None
        return greeting

    # ---- connecting

    def loop_back(self, own_peer: Peer) -> None:
        """Connect this worker to itself; see ``Loopback``."""
        connection = Loopback(self._loop)
        connection.start(_Established(self, own_peer))
        own_peer.step(Event.ACCEPT)
        own_peer.established(connection)

    def connect(self, peer: Peer) -> None:
        """Connect to a peer unless there is a connection or an attempt."""
        if not self.closed and peer.step(Event.DIAL):
            task = self._loop.create_task(self._dial(peer))
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)

    async def _dial(self, peer: Peer) -> None:
        assert self._view is not None
        try:
            connection = await dial(peer, self._transports, self.connect_seconds)
        except Unreachable as error:
            if not peer.connected:
                self.lose(peer, str(error))
            return
        if self.closed or not peer.step(Event.REACH):
            _drop(connection, "not needed any more")
            return
        self._greet(connection, peer).greet(Hello(self._view.me, peer.incarnation, self.group))

    async def connect_again(self, peer: Peer) -> Connection:
        """One more connection over the network to a connected peer, not yet started.

        Raises:
            OSError: there is no way.
        """
        addresses = [address for address in peer.member.addresses if address.startswith("tcp:")]
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await self._transports["tcp"].connect(address)
        return await self._transports["tcp"].connect(addresses[-1])

    # ---- handshakes (GreetingEvents)

    def hello_received(self, greeting: Greeting) -> None:
        hello = greeting.hello
        assert hello is not None
        if self._view is None:
            return  # ``join_group`` will judge it
        known = self._view.find(hello.member.incarnation)
        peer = self._events.peer_for(known) if known else None
        refusal = judge(
            hello,
            self._view,
            self.group,
            connected=peer is not None and peer.connected,
            connecting=peer is not None and peer.state in CONNECTING,
        )
        if refusal is not None:
            self._refuse(greeting, refusal)
            return
        peer = peer or self._events.peer_for(hello.member)
        greeting.welcome()
        peer.step(Event.ACCEPT)
        self._established(greeting, peer)

    def _refuse(self, greeting: Greeting, refusal: Refusal) -> None:
        if refusal.code != CROSSED:
            detail = f" ({refusal.detail})" if refusal.detail else ""
            logger.warning("refused %s: %s%s", greeting.connection.description, refusal.reason, detail)
        greeting.refuse(refusal)

    def welcomed(self, greeting: Greeting) -> None:
        peer = greeting.peer
        assert peer is not None
        if peer.step(Event.WELCOME):
            greeting.finish()
            peer.dialled = True
            self._established(greeting, peer)
        else:
            greeting.connection.close("not needed any more")

    def refused(self, greeting: Greeting, refusal: Refusal) -> None:
        peer = greeting.peer
        if peer is None:
            self._refuse(greeting, refusal)
            return
        greeting.finish()
        _drop(greeting.connection, "refused")
        if refusal.code != CROSSED:
            self.lose(peer, f"it refused the connection: {refusal.reason}")
        elif peer.step(Event.CROSS):
            self._loop.call_later(self.connect_seconds, self._crossed_expired, peer)

    def _crossed_expired(self, peer: Peer) -> None:
        if not peer.connected:
            self.lose(peer, f"it did not connect within {self.connect_seconds:g} s, as announced")

    def lane_received(self, connection: Connection, header: dict[str, Any]) -> None:
        if self.lane_came is None:
            raise ProtocolError("a lane, which this worker does not take")
        self.lane_came(connection, header)

    def ended(self, greeting: Greeting, failure: str | None) -> None:
        self._greetings.pop(greeting, None)
        if failure is None or self.closed:
            return
        if greeting.peer is not None:
            if not greeting.peer.connected:
                self.lose(greeting.peer, f"the handshake with it failed: {failure}")
        elif not greeting.is_refused:
            level = logging.WARNING if greeting.connection.received_anything else logging.DEBUG
            logger.log(level, "refused %s: %s", greeting.connection.description, failure)

    def _established(self, greeting: Greeting, peer: Peer) -> None:
        connection = greeting.connection
        connection.description = f"worker '{peer.name}'"
        connection.set_frame_limits(
            max(self._max_frame_bytes, SMALL_FRAME_BYTES), peer.member.max_message_bytes
        )
        connection.owner = _Established(self, peer)
        peer.established(connection)

    # ---- the end

    def lose(self, peer: Peer, reason: str) -> None:
        """A worker is gone, because ``reason``: close what is left of it and tell the agent, once."""
        self._lose(peer, reason, logging.WARNING)

    def goodbye_received(self, peer: Peer, frame: Frame) -> None:
        """A peer leaves, and says so."""
        reason = legible(frame.header.get("reason", "it left"))
        self._lose(peer, reason, logging.WARNING if reason.startswith(CRASHED) else logging.INFO)

    def _lose(self, peer: Peer, reason: str, level: int) -> None:
        if not peer.step(Event.LOSE):
            return
        logger.log(level, "worker '%s' (id %d) is gone: %s", peer.name, peer.member.id, reason)
        connection = peer.gone(reason)
        if connection is not None:
            _drop(connection, reason)
        self._events.peer_gone(peer, reason)

    def connections(self, peers: Iterable[Peer]) -> list[Connection | Listener]:
        """Everything that is open right now, listeners included."""
        found: list[Connection | Listener] = [*self._listeners]
        found += [greeting.connection for greeting in self._greetings]
        found += [peer.connection for peer in peers if peer.connection is not None]
        return found

    @property
    def handshaking(self) -> int:
        """How many connections are there whose two sides do not know each other yet."""
        return len(self._greetings)

    async def close(self, peers: list[Peer], reason: str) -> None:
        """Say goodbye to all peers, and close everything once what is queued is sent."""
        self.closed = True
        self.stop_listening()
        for task in self._dialling:
            task.cancel()
        for greeting in list(self._greetings):
            greeting.connection.close("shutting down")
        buffers, size = encode(Kind.GOODBYE, 0, {"reason": reason}, ())
        leaving: list[Connection] = []
        closed: list[asyncio.Future[None]] = []
        for peer in peers:
            peer.step(Event.LEAVE)
            connection = peer.gone("this worker has shut down")
            if connection is not None:
                connection.owner = farewell = _Farewell(self._loop)
                leaving.append(connection)
                closed.append(farewell.closed)
                with contextlib.suppress(ConnectionClosed):
                    connection.send(buffers, size, wait=False, last=True)
                connection.close("shut down", flush=True)
        try:
            if closed:
                await asyncio.wait(closed, timeout=self.farewell_seconds)
        finally:
            for connection in leaving:
                connection.close("its peer does not read")  # unless it has closed: callers may wait for room


class _Established:
    """Owner of an established connection, which passes frames on to the agent."""

    def __init__(self, connections: Connections, peer: Peer) -> None:
        self._connections = connections
        self._peer = peer
        events = connections._events
        self.followed = events.followed
        self.take_inline = partial(events.take_inline, peer)
        self._receive = events.frames_received

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        self._receive(self._peer, frames)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if reason == CLOSED_BY_PEER:
            reason += " without a goodbye; its process has died, most likely"
        self._connections.lose(self._peer, reason)


class _Farewell(SilentOwner):
    """Owner of a connection that closes when the last of what is queued is sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def _drop(connection: Connection, reason: str) -> None:
    connection.owner = SilentOwner()
    connection.close(reason)
