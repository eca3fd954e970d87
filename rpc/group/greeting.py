"""Shaking hands on a connection: the shell round ``handshake``."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from rpc.errors import ProtocolError
from rpc.group.handshake import Authenticator, Handshake, Hello, Message, Refusal, Role, State, Welcomed
from rpc.group.peer import Peer
from rpc.transport.base import Connection, SilentOwner
from rpc.wire.frames import Frame, Kind, encode

__all__ = ["Greeting", "GreetingEvents"]


class GreetingEvents(Protocol):
    """What is told of a handshake, on the loop's thread."""

    def hello_received(self, greeting: Greeting) -> None:
        """At the acceptor: ``greeting.hello`` is to be judged; ``welcome`` or ``refuse`` follows."""

    def refused(self, greeting: Greeting, refusal: Refusal) -> None:
        """At the dialler: the other side does not let this worker in. At the acceptor: its proof is wrong."""

    def welcomed(self, greeting: Greeting) -> None:
        """At the dialler: the other side has let this worker in."""

    def lane_received(self, connection: Connection, header: dict[str, Any]) -> None:
        """At the acceptor: one more connection of a worker's; raises ``ProtocolError`` if it is none."""

    def ended(self, greeting: Greeting, failure: str | None) -> None:
        """It is over: the connection has closed before its end, because ``failure``, or it has succeeded."""


class Greeting(SilentOwner):
    """Owns a connection until both sides know each other. On the loop's thread.

    Args:
        loop: the agent's.
        events: told how it goes.
        connection: not yet started.
        peer: whom this side connects to; None on the accepting side.
        seconds: how long it may take.
        authenticator: see ``Handshake``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        events: GreetingEvents,
        connection: Connection,
        peer: Peer | None,
        seconds: float,
        authenticator: Authenticator | None,
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.hello: Hello | None = None
        """At the acceptor, what waits to be judged."""
        self._events = events
        role = Role.ACCEPTOR if peer is None else Role.DIALLER
        self._handshake = Handshake(role, authenticator)
        self._timer = loop.call_later(seconds, connection.close, f"no handshake within {seconds:g} s")
        connection.start(self)

    @property
    def is_refused(self) -> bool:
        """Whether the other side, or this one, has been told why it is not let in."""
        return self._handshake.state is State.REFUSED

    def greet(self, hello: Hello) -> None:
        """At the dialler: begin."""
        self._send(self._handshake.greet(hello))

    def welcome(self) -> None:
        """Let the other side in."""
        self._send(self._handshake.welcome())
        self.finish()

    def refuse(self, refusal: Refusal) -> None:
        """Tell the other side why it is not let in, and hang up."""
        self._send(self._handshake.refuse(refusal))
        self.connection.close("refused", flush=True)

    def finish(self) -> None:
        """It has succeeded: somebody else owns the connection now."""
        self._timer.cancel()
        self._events.ended(self, None)

    def _send(self, message: Message) -> None:
        buffers, size = encode(message.kind, 0, message.header, ())
        self.connection.send(buffers, size, wait=False)

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        for index, frame in enumerate(frames):
            if connection.owner is not self:
                connection.owner.frames_received(connection, frames[index:])
                return
            if self.is_refused:
                return
            try:
                self._receive(frame)
            except Exception as error:
                # Nothing that a stranger says may do more than this.
                known = isinstance(error, ProtocolError)
                connection.close(str(error) if known else f"a malformed message ({type(error).__name__})")
                return

    def _receive(self, frame: Frame) -> None:
        handshake = self._handshake
        if frame.kind == Kind.LANE and self.peer is None and handshake.state is State.BEGUN:
            self._events.lane_received(self.connection, frame.header)
            self.finish()
            return
        match handshake.receive(frame.kind, frame.header):
            case Message() as message:
                self._send(message)
            case Hello() as hello:
                self.hello = hello
                self._events.hello_received(self)
            case Welcomed():
                self._events.welcomed(self)
            case Refusal() as refusal:
                self._events.refused(self, refusal)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self._timer.cancel()
        self._events.ended(self, reason)
