"""Connections to the other workers: listening, connecting, shaking hands, noticing that one is gone.

Everything here runs on the loop's thread. A connection belongs to a ``_Handshake`` until both sides know
each other, and to a ``_Link`` from then on, which passes its frames to the agent. When a link's connection
closes, the worker behind it is gone for good: there is one connection per pair, and nothing would tell
which of the messages on it have arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.group.handshake import CROSSED, Hello, judge, legible, parse_refusal
from rpc.group.loopback import Loopback
from rpc.group.membership import Membership
from rpc.group.peer import Peer
from rpc.group.ports import ConnectionEvents
from rpc.group.workers import Member
from rpc.transport import CLOSED_BY_PEER, Connection, ConnectionClosed, Listener, Transport
from rpc.wire.frames import Frame, Kind, encode

FAREWELL_SECONDS: Final = 5.0
"""How long what is queued for peers may take to be sent when this worker leaves."""

__all__ = ["SMALL_FRAME_BYTES", "Connections"]

logger = logging.getLogger(__name__)

SMALL_FRAME_BYTES: Final = 128 << 10
"""Frames up to this are accepted whatever the limit for messages: nobody checks them before sending."""

CONNECT_SECONDS: Final = 20.0
"""How long one address may take to answer, and how long a peer may take to shake hands."""


CRASHED: Final = "its program was ended by an exception"
"""What a worker says first in its goodbye, if so: the others' logs should show it."""


class Connections:
    """All connections of one agent.

    Args:
        loop: the agent's loop.
        transports: by scheme, best first.
        events: told of frames and of workers that are gone.
        max_frame_bytes: the largest frame that a peer may send.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transports: dict[str, Transport],
        events: ConnectionEvents,
        max_frame_bytes: int,
    ) -> None:
        self._loop = loop
        self._transports = transports
        self._events = events
        self._max_frame_bytes = max_frame_bytes
        self._listeners: list[Listener] = []
        self._handshakes: set[_Handshake] = set()
        self._early: list[tuple[_Handshake, Hello]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialled: set[int] = set()
        self._view: Membership | None = None
        self._group = ""
        self.stripe_came: Callable[[Connection, dict[str, Any]], None] | None = None
        """Takes over a connection that says to be a stripe, or raises ``ProtocolError``."""
        self._closed = False

    def listen(self, host: str, port: int) -> list[str]:
        """Listen with every transport; returns the addresses, best first."""
        try:
            for transport in self._transports.values():
                self._listeners.append(transport.listen(host, port, self._accepted))
        except BaseException:
            self.stop_listening()
            raise
        return [listener.address for listener in self._listeners]

    def join_group(self, view: Membership, group: str) -> None:
        """The group is formed: from now on hellos can be judged."""
        self._view, self._group = view, group
        early, self._early = self._early, []
        for handshake, hello in early:
            if handshake in self._handshakes:
                self._judge(handshake, hello)

    def connect(self, peer: Peer) -> None:
        """Connect to a peer unless there is a connection or an attempt."""
        if peer.connected or peer.connecting or peer.lost is not None or self._closed:
            return
        peer.connecting = True
        task = self._loop.create_task(self._connect(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, peer: Peer) -> None:
        assert self._view is not None
        failures: list[str] = []
        for address in self._reachable_addresses(peer.member):
            transport = self._transports[address.partition(":")[0]]
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    connection = await transport.connect(address)
            except TimeoutError:
                failures.append(f"{address}: no answer within {CONNECT_SECONDS:g} s")
            except Exception as error:  # unreachable, or an address that makes no sense
                failures.append(f"{address}: {_why(error)}")
            else:
                if peer.lost is not None or self._closed:
                    connection.start(_Closing())
                    connection.close("not needed any more")
                    return
                handshake = _Handshake(self, connection, peer)
                hello = Hello(self._view.me, peer.incarnation, self._group)
                buffers, size = encode(Kind.HELLO, 0, hello.header(), ())
                connection.send(buffers, size, wait=False)
                self._handshakes.add(handshake)
                return
        self.lose(peer, "it cannot be reached at " + ("; ".join(failures) or "any address known here"))

    def loop_back(self, own_peer: Peer, brings_nothing: Callable[[dict[str, Any]], bool]) -> None:
        """Connect this worker to itself; see ``Loopback``."""
        connection = Loopback(self._loop, brings_nothing)
        connection.start(_Link(self, own_peer))
        own_peer.established(connection)

    def has_dialled(self, peer: Peer) -> bool:
        """Whether this side made the connection to a peer, and not the other."""
        return peer.incarnation in self._dialled

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

    def _reachable_addresses(self, member: Member) -> list[str]:
        assert self._view is not None
        same_host = member.host == self._view.me.host
        return [
            address
            for address in member.addresses
            if address.partition(":")[0] in self._transports
            and (same_host or not address.startswith("unix:"))
        ]

    def _accepted(self, connection: Connection) -> None:
        self._handshakes.add(_Handshake(self, connection, None))

    def _hello_received(self, handshake: _Handshake, hello: Hello) -> None:
        if self._view is None:
            self._early.append((handshake, hello))
        else:
            self._judge(handshake, hello)

    def _judge(self, handshake: _Handshake, hello: Hello) -> None:
        assert self._view is not None
        known = self._view.find(hello.member.incarnation)
        peer = self._events.peer_for(known) if known else None
        refusal = judge(
            hello,
            self._view,
            self._group,
            connected=peer is not None and peer.connected,
            connecting=peer is not None and peer.connecting,
        )
        connection = handshake.connection
        if refusal is not None:
            handshake.answered = True
            if refusal.code != CROSSED:
                logger.warning("refused %s: %s", connection.description, refusal.reason)
            buffers, size = encode(Kind.REFUSED, 0, refusal.header(), ())
            connection.send(buffers, size, wait=False)
            connection.close("refused", flush=True)
            return
        buffers, size = encode(Kind.WELCOME, 0, {}, ())
        connection.send(buffers, size, wait=False)
        self._established(handshake, peer or self._events.peer_for(hello.member))

    def _established(self, handshake: _Handshake, peer: Peer) -> None:
        handshake.finish()
        if handshake.peer is not None:
            self._dialled.add(peer.incarnation)
        connection = handshake.connection
        connection.description = f"worker '{peer.name}'"
        connection.set_frame_limits(
            max(self._max_frame_bytes, SMALL_FRAME_BYTES), peer.member.max_message_bytes
        )
        connection.owner = _Link(self, peer)
        peer.connecting = False
        peer.established(connection)
        self._events.peer_connected(peer, connection)

    def lose(self, peer: Peer, reason: str) -> None:
        """A worker is gone, because ``reason``: close what is left of it and tell the agent, once."""
        self._lose(peer, reason, logging.WARNING)

    def goodbye_received(self, peer: Peer, frame: Frame) -> None:
        """A peer leaves, and says so."""
        reason = legible(frame.header.get("reason", "it left"))
        self._lose(peer, reason, logging.WARNING if reason.startswith(CRASHED) else logging.INFO)

    def _lose(self, peer: Peer, reason: str, level: int) -> None:
        if peer.lost is not None:
            return
        logger.log(level, "worker '%s' (id %d) is gone: %s", peer.name, peer.member.id, reason)
        connection = peer.gone(reason)
        peer.connecting = False
        if connection is not None:
            connection.owner = _Closing()
            connection.close(reason)
        self._events.peer_gone(peer, reason)

    def connections(self, peers: Iterable[Peer]) -> list[Connection | Listener]:
        """Everything that is open right now, listeners included."""
        found: list[Connection | Listener] = [*self._listeners]
        found += [handshake.connection for handshake in self._handshakes]
        found += [peer.connection for peer in peers if peer.connection is not None]
        return found

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def close(self, peers: list[Peer], reason: str) -> None:
        """Say goodbye to all peers, and close everything once what is queued is sent."""
        self._closed = True
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        for handshake in list(self._handshakes):
            handshake.connection.close("shutting down")
        farewells: list[_Farewell] = []
        leaving: list[Connection] = []
        for peer in peers:
            connection = peer.gone("this worker has shut down")
            if connection is not None:
                buffers, size = encode(Kind.GOODBYE, 0, {"reason": reason}, ())
                connection.owner = farewell = _Farewell(self._loop)
                farewells.append(farewell)
                leaving.append(connection)
                with contextlib.suppress(ConnectionClosed):
                    connection.send(buffers, size, wait=False, last=True)
                connection.close("shut down", flush=True)
        try:
            if farewells:
                await asyncio.wait([farewell.sent for farewell in farewells], timeout=FAREWELL_SECONDS)
        finally:
            for connection in leaving:
                connection.close("its peer does not read")  # unless it has closed: callers may wait for room


def _why(error: Exception) -> str:
    """What hinders a connection, in the system's words."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


class _Farewell:
    """Owner of a connection that closes when the last of what is queued is sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sent: asyncio.Future[None] = loop.create_future()

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        pass

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if not self.sent.done():
            self.sent.set_result(None)


class _Closing:
    """Owner of a connection whose fate interests nobody any more."""

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        pass

    def connection_lost(self, connection: Connection, reason: str) -> None:
        pass


class _Link:
    """Owner of an established connection."""

    __slots__ = ("_links", "_peer", "_receive")

    def __init__(self, links: Connections, peer: Peer) -> None:
        self._links = links
        self._peer = peer
        self._receive: Callable[[Peer, list[Frame]], None] = links._events.frames_received

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        self._receive(self._peer, frames)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if reason == CLOSED_BY_PEER:
            reason += " without a goodbye; its process has died, most likely"
        self._links.lose(self._peer, reason)


class _Handshake:
    """Owner of a connection whose two ends do not know each other yet.

    Args:
        links: all connections of the agent.
        connection: not yet started.
        peer: whom this side connects to; None on the accepting side.
    """

    def __init__(self, links: Connections, connection: Connection, peer: Peer | None) -> None:
        self.connection = connection
        self._links = links
        self.peer = peer
        self._heard = False
        self.answered = False
        """Whether the other side was told why it is refused, and the log as well."""
        self._timer = links._loop.call_later(CONNECT_SECONDS, self._expired)
        connection.start(self)

    def finish(self) -> None:
        self._timer.cancel()
        self._links._handshakes.discard(self)

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        try:
            self._answered(frames[0]) if self.peer is not None else self._asked(frames[0])
        except Exception as error:
            # Nothing that a stranger says may do more than this.
            known = isinstance(error, ProtocolError)
            connection.close(str(error) if known else f"a malformed message ({type(error).__name__})")
            return
        if len(frames) > 1 and connection.owner is not self:
            connection.owner.frames_received(connection, frames[1:])

    def _asked(self, frame: Frame) -> None:
        take = self._links.stripe_came
        if frame.kind == Kind.STRIPE and not self._heard and take is not None:
            take(self.connection, frame.header)
            self.finish()
            return
        if frame.kind != Kind.HELLO or self._heard:
            raise ProtocolError(f"expected one hello, got a frame of kind {frame.kind}")
        self._heard = True
        self._links._hello_received(self, Hello.parse(frame.header))

    def _answered(self, frame: Frame) -> None:
        peer = self.peer
        assert peer is not None
        if frame.kind == Kind.WELCOME:
            if peer.connected or peer.lost is not None:
                self.connection.close("not needed any more")
            else:
                self._links._established(self, peer)
            return
        if frame.kind != Kind.REFUSED:
            raise ProtocolError(f"expected welcome or refused, got a frame of kind {frame.kind}")
        refusal = parse_refusal(frame.header)
        self.finish()
        self.connection.owner = _Closing()
        self.connection.close("refused")
        if refusal.code == CROSSED:
            # The other side connects to this one: its hello is on the way, or was accepted already.
            if not peer.connected:
                self._links._loop.call_later(CONNECT_SECONDS, self._crossed_expired)
            return
        self._links.lose(peer, f"it refused the connection: {refusal.reason}")

    def _crossed_expired(self) -> None:
        if self.peer is not None and not self.peer.connected and self.peer.lost is None:
            self._links.lose(self.peer, f"it did not connect within {CONNECT_SECONDS:g} s, as announced")

    def _expired(self) -> None:
        self.connection.close(f"no handshake within {CONNECT_SECONDS:g} s")

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self.finish()
        if self._links._closed:
            return
        if self.peer is None:
            if not self.answered:
                level = logging.WARNING if connection.received_anything else logging.DEBUG
                logger.log(level, "refused %s: %s", connection.description, reason)
        elif not self.peer.connected and self.peer.lost is None:
            self._links.lose(self.peer, f"the handshake with it failed: {reason}")
