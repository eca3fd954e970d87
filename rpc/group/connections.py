"""Connections to the other workers: listening, shaking hands, detecting lost connections.

``dialling`` decides when to connect and when to reconnect.

Everything here runs on the loop's thread. A connection is owned by a ``Greeting`` during the handshake, and
by an ``_Established`` from then on, which passes its frames to the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from rpc.errors import ProtocolError
from rpc.group.admission import CROSSED, judge
from rpc.group.dialling import QUIET_SECONDS, Dialler
from rpc.group.greeting import SLOW_SECONDS, Greeting
from rpc.group.handshake import Hello, Refusal, Stream, Welcomed
from rpc.group.link import CONNECTING
from rpc.group.loopback import Loopback
from rpc.group.membership import Membership
from rpc.group.own_time import Neighbours, OwnTime
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.runtime.legible import legible
from rpc.runtime.limited_log import LimitedLog
from rpc.runtime.tasks import Task
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.base import (
    CLOSED_BY_PEER,
    Connection,
    ConnectionClosed,
    ConnectionOwner,
    Listener,
    Transport,
)
from rpc.wire.frames import Frame, Kind, encode
from rpc.wire.targets import Target

__all__ = ["CRASHED", "FAREWELL_SECONDS", "SMALL_FRAME_BYTES", "ConnectionEvents", "Connections", "Wrap"]

logger = logging.getLogger(__name__)

SMALL_FRAME_BYTES: Final = 128 << 10
"""Maximum size in bytes of a frame that is accepted whatever the limit for messages: senders do not check
these.
"""

CONNECT_SECONDS: Final = 20.0
"""Timeout in seconds for one address to answer, and then for the worker there to complete the handshake."""

STRANGER_SECONDS: Final = 5.0
"""Timeout in seconds for the other side of a new connection to prove that it belongs to the job."""

MAX_STRANGERS: Final = 256
"""Maximum number of connections whose other side has not proven that. Beyond it, the one that has tried
longest is closed if it is slow; the transports limit how many may connect at a time.
"""

_LEAVER_SECONDS: Final = 1.0
_LEAVER_PAUSE: Final = 0.01
"""Pause in seconds: a worker that leaves and returns may be heard before its goodbye on the old
connection.
"""

FAREWELL_SECONDS: Final = 5.0
"""Timeout in seconds for sending the queued frames to peers when this worker leaves."""

CRASHED: Final = "its program was ended by an exception"
"""Beginning of the reason in a worker's goodbye after an unhandled exception, for the logs of the others."""


class ConnectionEvents(Protocol):
    """The callbacks of ``Connections`` to the agent, on the loop's thread except where noted."""

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None: ...

    def stream_came(self, connection: Connection, stream: Stream) -> Callable[[], object]:
        """Check a connection that is to become a bulk stream. Returns the function that takes it over once it
        is accepted; raises ``ProtocolError`` if it is not expected.
        """

    def take_inline(self, peer: Peer, frames: list[Frame], *, keep: bool) -> Task | None:
        """On any thread; see ``Receiver``."""

    def find_target(self, peer: Peer, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        """See ``ConnectionOwner``."""

    def peer_for(self, member: Member) -> Peer:
        """Return the peer of a member, which is made if necessary."""

    def peer_broke(self, peer: Peer) -> None:
        """The connection to a worker broke, and will be made again."""

    def peer_gone(self, peer: Peer, reason: str) -> None: ...


Wrap = Callable[[Peer, Connection], Connection]
"""Makes, from an established connection, the one that its peer sends by."""


class Connections:
    """All connections of one agent.

    Args:
        loop: the agent's loop.
        transports: the transports by scheme, best first.
        max_frame_bytes: maximum size in bytes of a frame from a peer.
        authenticator: has other workers prove that they belong to the job; None for no authentication.
        handshake_seconds: timeout in seconds for the handshake with a worker that this one connects to.
        reconnect_seconds: timeout in seconds for reconnecting after a connection broke; 0 for no
        reconnecting.
        own_time: the clock for limits of time; by default the loop's.

    Attributes:
        group: key of the group, once it is formed.
        closed: whether this worker is leaving, or has left.
        dialler: connects to other workers.
        neighbours: looks at the processes of workers on this host.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transports: Mapping[str, Transport],
        max_frame_bytes: int,
        authenticator: TokenAuthenticator | None = None,
        *,
        handshake_seconds: float = CONNECT_SECONDS,
        reconnect_seconds: float = 0.0,
        own_time: OwnTime | None = None,
    ) -> None:
        self.connect_seconds = CONNECT_SECONDS
        self.handshake_seconds = handshake_seconds
        self.reconnect_seconds = reconnect_seconds
        self.stranger_seconds = STRANGER_SECONDS
        self.farewell_seconds = FAREWELL_SECONDS
        self.group = ""
        self.closed = False
        self.loop = loop
        self.own_time = own_time or OwnTime(loop.time)
        self.neighbours = Neighbours()
        self.authenticator = authenticator
        self._events: ConnectionEvents
        self._transports = transports
        self._wrap: Wrap | None = None
        self._tells_losses = True
        self._max_frame_bytes = max_frame_bytes
        self._view: Membership | None = None
        self._listeners: list[Listener] = []
        self._greetings: dict[Greeting, None] = {}  # in the order in which they began
        self._strangers: dict[Greeting, None] = {}  # those whose other side is not yet authenticated
        self._refusals = LimitedLog(logger)
        self.dialler = Dialler(loop, transports, self)

    # ---- set up

    def serve(self, events: ConnectionEvents) -> None:
        """Report frames and lost workers to ``events`` from now on. Called before ``listen``."""
        self._events = events

    def wrap_with(self, wrap: Wrap | None) -> None:
        """Let ``wrap`` wrap the connections that peers send by; None: do not wrap them."""
        self._wrap = wrap

    @property
    def are_wrapped(self) -> bool:
        """Whether ``wrap_with`` was called with a function."""
        return self._wrap is not None

    def tell_losses(self, *, tells: bool) -> None:
        """Set whether the log names lost workers. It need not if another agent of the process does, or if
        this worker is leaving itself.
        """
        self._tells_losses = tells

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
        """Record that the group is formed: from now on, hellos can be checked."""
        self._view, self.group = view, group
        for greeting in list(self._greetings):
            if greeting.hello is not None:
                self._judge(greeting, greeting.hello)

    def _accepted(self, connection: Connection) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            if self.loop.time() - oldest.began > SLOW_SECONDS:
                oldest.connection.close("too many others wait to shake hands")
        greeting = Greeting(self, connection, self.stranger_seconds)
        self._strangers[greeting] = self._greetings[greeting] = None

    def _greet(
        self, connection: Connection, peer: Peer, stream: asyncio.Future[None] | None = None
    ) -> Greeting:
        seconds = self.handshake_seconds if stream is None else self.connect_seconds
        greeting = Greeting(self, connection, seconds, peer, stream)
        self._greetings[greeting] = None
        return greeting

    # ---- connecting

    def peer_broke(self, peer: Peer) -> None:
        """See ``DiallerOwner``."""
        self._events.peer_broke(peer)

    def loop_back(self, own_peer: Peer) -> None:
        """Connect this worker to itself; see ``Loopback``."""
        connection = Loopback(self.loop)
        connection.start(_Established(self, own_peer))
        own_peer.link.accept(self.own_time())
        self._hand_over(own_peer, connection)

    def reached(self, peer: Peer, connection: Connection) -> None:
        """One of the peer's addresses accepted a connection: start the handshake."""
        if self.closed or not peer.link.reach(connection.process):
            _drop(connection, "not needed any more")
            return
        for earlier in [each for each in self._greetings if each.peer is peer and each.stream is None]:
            earlier.finish()
            _drop(earlier.connection, "another attempt takes its place")
        assert self._view is not None
        session = peer.session.connections, peer.session.received
        self._greet(connection, peer).greet(Hello(self._view.me, peer.incarnation, self.group, session))

    async def open_stream(self, peer: Peer, stream: Stream) -> Connection:
        """Open one more network connection to a connected peer. Raises ``OSError`` if that is impossible or
        refused.
        """
        connection = await self._connect_again(peer)
        welcome: asyncio.Future[None] = self.loop.create_future()
        self._greet(connection, peer, welcome).greet(stream)
        try:
            await welcome
        except BaseException:
            _drop(connection, "not needed any more")
            raise
        return connection

    async def _connect_again(self, peer: Peer) -> Connection:
        addresses = [address for address in peer.member.addresses if address.startswith("tcp:")]
        if not addresses or "tcp" not in self._transports:
            raise ConnectionError("there is no way to it over TCP")
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await self._transports["tcp"].connect(address)
        return await self._transports["tcp"].connect(addresses[-1])

    # ---- outcomes of handshakes

    def heard(self, greeting: Greeting, said: Hello | Stream | Welcomed | Refusal) -> None:
        """Handle the other side's hello, its welcome, its refusal, or a wrong proof."""
        peer = greeting.peer
        if greeting.stream is not None:
            self._stream_heard(greeting, greeting.stream, said)
            return
        match said:
            case Stream() as stream:
                take_over = self._events.stream_came(greeting.connection, stream)
                greeting.welcome()
                greeting.finish()
                take_over()
            case Hello() as hello:
                self._strangers.pop(greeting, None)
                greeting.hello = hello
                greeting.wait(self.connect_seconds)
                if self._view is not None:  # otherwise ``join_group`` will check it
                    self._judge(greeting, hello)
            case Refusal() as refusal:
                if peer is None:
                    self._refuse(greeting, refusal)
                    return
                greeting.finish()
                _drop(greeting.connection, "refused")
                if refusal.code != CROSSED:
                    self.lose(peer, f"it refused the connection: {refusal.reason}")
                elif peer.link.cross():
                    self.dialler.crossed(peer)
            case Welcomed(session):
                assert peer is not None
                if peer.link.welcome(self.own_time()):
                    self._establish(greeting, peer, session)
                else:
                    greeting.connection.close("not needed any more")

    def _stream_heard(self, greeting: Greeting, stream: asyncio.Future[None], said: object) -> None:
        """Handle the answer to an additional connection."""
        if isinstance(said, Welcomed):
            if not stream.done():
                stream.set_result(None)
                greeting.finish()
            return
        greeting.connection.close(said.reason if isinstance(said, Refusal) else "refused")

    def _judge(self, greeting: Greeting, hello: Hello) -> None:
        assert self._view is not None
        newcomer = hello.member
        known, gone = self._view.find(newcomer.incarnation), self._view.gone_reason(newcomer.incarnation)
        if known is None and gone is None and hello.group == self.group and not self._view.static:
            rivals = self._replace(newcomer)
            if rivals and self.loop.time() - greeting.began < _LEAVER_SECONDS:
                self.loop.call_later(_LEAVER_PAUSE, self._judge_again, greeting, hello)
                return
            if rivals:
                for rival in rivals:
                    rival.link.claimed_by = newcomer.incarnation
                greeting.connection.close("a connected worker has its name or id: it has to connect again")
                return
        peer = self._events.peer_for(known) if known else None
        is_lost = (
            peer is not None
            and peer.connected
            and peer.link.has_lost_its_end(hello.session[0], peer.session.connections, peer.session.heard)
        )
        refusal = judge(
            hello,
            self._view,
            self.group,
            connected=peer is not None and peer.connected and not is_lost,
            connecting=peer is not None and peer.link.state in CONNECTING,
        )
        if refusal is not None:
            self._refuse(greeting, refusal)
            if refusal.code == CROSSED and peer is not None and not peer.connected:
                self.dialler.crosses(peer)
            return
        peer = peer or self._events.peer_for(hello.member)
        if is_lost and peer.connection is not None:
            connection = peer.connection
            self.dialler.broke(peer, "the other side has lost the connection", connect=False)
            _drop(connection, "the other side has lost it")
        if not peer.is_quiet:
            self.loop.call_later(QUIET_SECONDS, self._judge_again, greeting, hello)
            return
        number = max(hello.session[0], peer.session.connections) + 1
        greeting.welcome((number, peer.session.received))
        peer.link.accept(self.own_time(), greeting.connection.process, peer.session.heard)
        self._establish(greeting, peer, (number, hello.session[1]))

    def _replace(self, newcomer: Member) -> list[Peer]:
        """Handle a newcomer of a dynamic group that takes over a name or id, which it may only do once the
        previous owner has ended or was removed. The previous owner is lost, unless there is a connection to
        it, which is about to end (it does not end if its host has died). But the newcomer itself may be the
        one that ended, if its hello came late; so it has to connect again.

        Returns the previous owners for which the newcomer must wait.
        """
        assert self._view is not None
        rivals = [self._events.peer_for(each) for each in self._view.rivals(newcomer)]
        if any(peer.is_self for peer in rivals):
            return []
        for peer in rivals:
            if not peer.connected or peer.link.claimed_by == newcomer.incarnation:
                self.lose(
                    peer, f"it has ended, as worker '{newcomer.name}' (id {newcomer.id}) has come since"
                )
        return [peer for peer in rivals if peer.lost is None]

    def _judge_again(self, greeting: Greeting, hello: Hello) -> None:
        if greeting in self._greetings:
            self._judge(greeting, hello)
            return
        assert self._view is not None
        known = self._view.find(hello.member.incarnation)
        peer = self._events.peer_for(known) if known else None
        if peer is not None and not peer.connected:  # it has broken in the meantime
            self.dialler.connect(peer)

    def _refuse(self, greeting: Greeting, refusal: Refusal) -> None:
        if refusal.code != CROSSED:
            detail = f" ({refusal.detail})" if refusal.detail else ""
            described = greeting.connection.description
            self._refusals.log(logging.WARNING, "refused %s: %s%s", described, refusal.reason, detail)
        greeting.refuse(refusal)

    def ended(self, greeting: Greeting, failure: str | None) -> None:
        """Handle the end of a handshake: it has succeeded, or the connection has closed, because of
        ``failure``.
        """
        self._greetings.pop(greeting, None)
        self._strangers.pop(greeting, None)
        if greeting.stream is not None and not greeting.stream.done():
            greeting.stream.set_exception(ConnectionError(f"a stream was not opened: {legible(failure)}"))
        if failure is None or self.closed or greeting.stream is not None:
            return
        if greeting.peer is not None:
            if not greeting.peer.connected:
                may_live = not greeting.connection.malformed
                self.dialler.failed(
                    greeting.peer, f"the handshake with it failed: {failure}", may_live=may_live
                )
        elif not greeting.is_refused:
            level = logging.WARNING if greeting.connection.received_anything else logging.DEBUG
            self._refusals.log(level, "refused %s: %s", greeting.connection.description, legible(failure))

    def _establish(self, greeting: Greeting, peer: Peer, session: tuple[int, int]) -> None:
        greeting.finish()
        connection = greeting.connection
        logger.debug(
            "connected to worker '%s' (id %d) by %s", peer.name, peer.member.id, connection.description
        )
        connection.description = f"worker '{peer.name}'"
        received = max(self._max_frame_bytes, SMALL_FRAME_BYTES)
        connection.set_frame_limits(received, peer.member.max_message_bytes)
        connection.owner = _Established(self, peer)
        try:
            self._hand_over(peer, connection, *session)
        except ProtocolError as error:
            _drop(connection, "the two have lost count")
            self.lose(peer, str(error))

    def _hand_over(self, peer: Peer, connection: Connection, *session: int) -> None:
        wrapped = connection if self._wrap is None else self._wrap(peer, connection)
        peer.established(wrapped, *session)

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.GOODBYE, self.goodbye_received)

    # ---- closing

    def lose(self, peer: Peer, reason: str) -> None:
        """Record that a worker is lost, for ``reason``: close its connection and notify the agent, once."""
        self._lose(peer, legible(reason), left=False)  # it may quote what the worker sent

    def goodbye_received(self, peer: Peer, frame: Frame) -> None:
        """Handle the goodbye of a peer that leaves."""
        reason = legible(frame.header.get("reason", "it left"))
        self._lose(peer, reason, left=not reason.startswith(CRASHED))

    def _lose(self, peer: Peer, reason: str, *, left: bool) -> None:
        if not peer.link.lose():
            return
        level = logging.INFO if left else logging.WARNING
        level = level if self._tells_losses else logging.DEBUG
        me = "" if self._view is None else f"worker '{self._view.me.name}': "
        try:
            logger.log(level, "%sworker '%s' (id %d) is gone: %s", me, peer.name, peer.member.id, reason)
        finally:  # also if a log handler of the program's raises: nothing loses the worker again
            connection = peer.gone(reason, left=left)
            if connection is not None:
                _drop(connection, reason)
            self._events.peer_gone(peer, reason)

    def connections(self, peers: Iterable[Peer]) -> list[Connection | Listener]:
        """Return all open connections and listeners."""
        found: list[Connection | Listener] = [*self._listeners]
        found += [greeting.connection for greeting in self._greetings]
        found += [peer.connection for peer in peers if peer.connection is not None]
        return found

    @property
    def handshaking(self) -> int:
        """Number of connections on which the handshake is not complete."""
        return len(self._greetings)

    async def close(self, peers: list[Peer], reason: str) -> None:
        """Say goodbye to all peers, and close everything once the queued frames are sent."""
        self.closed = True
        self.stop_listening()
        self.dialler.stop()
        for greeting in list(self._greetings):
            greeting.connection.close("shutting down")
        buffers, size = encode(Kind.GOODBYE, 0, {"reason": reason}, ())
        leaving: list[Connection] = []
        closed: list[asyncio.Future[None]] = []
        for peer in peers:
            peer.link.leave()
            connection = peer.gone("this worker has shut down")
            if connection is not None:
                connection.owner = farewell = _Farewell(self.loop)
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
                connection.close("its peer does not read")  # if it is still open: callers may wait for room


class _Established(ConnectionOwner):
    """Owner of an established connection; passes its frames on to the agent."""

    def __init__(self, connections: Connections, peer: Peer) -> None:
        self._connections = connections
        self._peer = peer
        events = connections._events
        # Without a function in between, for each frame.
        self.take_inline = partial(events.take_inline, peer)  # type: ignore[method-assign]
        self.find_target = partial(events.find_target, peer)  # type: ignore[method-assign]
        self._receive = events.frames_received

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        self._receive(self._peer, frames)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if connection.malformed:
            self._connections.lose(self._peer, reason)
            return
        if reason == CLOSED_BY_PEER:
            reason += " without a goodbye"
        self._connections.dialler.broke(self._peer, reason)


class _Farewell(ConnectionOwner):
    """Owner of a connection that closes when its queue is empty."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, connection: Connection, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def _drop(connection: Connection, reason: str) -> None:
    connection.owner = ConnectionOwner()
    connection.close(reason)
