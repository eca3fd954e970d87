"""The beginning of a connection, until both sides know each other: the shell round ``handshake``.

A ``Greeting`` owns the connection for that time. It says and hears the handshake's messages, has the other
side take no longer than it may, and tells its ``GreetingDesk`` what it comes to. On the loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from rpc.errors import ProtocolError
from rpc.group.handshake import (
    Authenticator,
    Handshake,
    HandshakeMessage,
    HandshakeState,
    Hello,
    Refusal,
    Role,
    Stream,
    Welcomed,
)
from rpc.group.peer import Peer
from rpc.transport.base import INFINITE, Connection, SilentOwner
from rpc.wire.frames import Frame, encode

__all__ = ["SLOW_SECONDS", "Greeting", "GreetingDesk"]

SLOW_SECONDS: Final = 1.0
"""Who has taken longer is slow; and a timer that is later by more was not looked at in time."""


class GreetingDesk(Protocol):
    """Who decides what becomes of a greeting."""

    loop: asyncio.AbstractEventLoop

    authenticator: Authenticator | None

    def heard(self, greeting: Greeting, said: Hello | Stream | Welcomed | Refusal) -> None:
        """The other side wants to be let in, has let this worker in, or does not. Or its proof is wrong."""

    def ended(self, greeting: Greeting, failure: str | None) -> None:
        """It is over: the connection has closed, because ``failure``, or somebody else owns it now."""


class Greeting(SilentOwner):
    """Owns a connection until both sides know each other: the shell round ``handshake``.

    ``peer`` is whom this side connects to, None on the accepting side, where ``hello`` is to be judged. With
    ``stream``, which is done when this one is welcome, it is connected to it already.
    """

    def __init__(
        self,
        desk: GreetingDesk,
        connection: Connection,
        seconds: float,
        peer: Peer | None = None,
        stream: asyncio.Future[None] | None = None,
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.hello: Hello | None = None
        self.stream = stream
        self.began = desk.loop.time()
        self._desk = desk
        role = Role.ACCEPTOR if peer is None else Role.DIALLER
        self._handshake = Handshake(role, desk.authenticator)
        self._timer: asyncio.TimerHandle | None = None
        self.wait(seconds)
        connection.start(self)

    def wait(self, seconds: float) -> None:
        """From now on, the other side may take so long to go on."""
        loop = self._desk.loop
        if self._timer is not None:
            self._timer.cancel()
        if seconds < INFINITE:
            self._timer = loop.call_later(seconds, self._expired, seconds, loop.time() + seconds)

    def _expired(self, seconds: float, due: float) -> None:
        if self._desk.loop.time() > due + SLOW_SECONDS:
            self.wait(seconds)  # it was this process that stood still: what has come was not looked at yet
        else:
            self.connection.close(f"no handshake within {seconds:g} s")

    @property
    def is_refused(self) -> bool:
        """Whether the other side, or this one, has been told why it is not let in."""
        return self._handshake.state is HandshakeState.REFUSED

    def greet(self, hello: Hello | Stream) -> None:
        """At the dialler: begin."""
        self._send(self._handshake.greet(hello))

    def welcome(self, session: tuple[int, int] = (1, 0)) -> None:
        """Let the other side in."""
        self._send(self._handshake.welcome(session))

    def refuse(self, refusal: Refusal) -> None:
        """Tell the other side why it is not let in, and hang up."""
        self._send(self._handshake.refuse(refusal))
        self.connection.close("refused", flush=True)

    def finish(self) -> None:
        """It is over: somebody else owns the connection now."""
        self._cancel_timer()
        self._desk.ended(self, None)

    def _send(self, message: HandshakeMessage) -> None:
        buffers, _ = encode(message.kind, 0, message.header, ())
        self.connection.send_sign(b"".join(buffers))

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
                connection.malformed = True
                connection.close(str(error) if known else f"a malformed message ({type(error).__name__})")
                return

    def _receive(self, frame: Frame) -> None:
        said = self._handshake.receive(frame.kind, frame.header)
        if isinstance(said, HandshakeMessage):
            self._send(said)
        else:
            self._desk.heard(self, said)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self._cancel_timer()
        self._desk.ended(self, reason)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
