"""The handshake of a connection: the shell around ``handshake``.

A ``Greeting`` owns the connection during the handshake. It sends and receives the handshake's messages,
applies a timeout to the other side, and reports the outcome to its ``GreetingDesk``. On the loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from rpc.errors import ProtocolError, is_violation
from rpc.group.handshake import (
    Handshake,
    HandshakeMessage,
    HandshakeState,
    Hello,
    Refusal,
    Stream,
    Welcomed,
)
from rpc.group.own_time import LEAST_SECONDS, OwnTime
from rpc.group.peer import Peer
from rpc.transport.authentication import Role, TokenAuthenticator
from rpc.transport.base import INFINITE, Connection, ConnectionOwner
from rpc.wire.frames import Frame, encode

__all__ = ["SLOW_SECONDS", "Greeting", "GreetingDesk"]

SLOW_SECONDS: Final = 1.0
"""Time in seconds after which a handshake is slow; a timer that is later by more was delayed by
this process.
"""


class GreetingDesk(Protocol):
    """Receives the outcome of a greeting."""

    loop: asyncio.AbstractEventLoop

    own_time: OwnTime

    authenticator: TokenAuthenticator | None

    def heard(self, greeting: Greeting, said: Hello | Stream | Welcomed | Refusal) -> None:
        """Called with the other side's hello, its welcome, its refusal, or a refusal because its proof is
        wrong.
        """

    def ended(self, greeting: Greeting, failure: str | None) -> None:
        """Called at the end: the connection has closed, because of ``failure``, or it has another
        owner now.
        """


class Greeting(ConnectionOwner):
    """Owner of a connection during the handshake: the shell around ``handshake``.

    ``peer`` is the worker that this side connects to; None on the accepting side, which decides about
    ``hello``. With ``stream``, a future that is done when the stream is accepted, the peer is connected
    already.
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
        """Start a timeout of ``seconds`` for the other side's next message."""
        loop = self._desk.loop
        if self._timer is not None:
            self._timer.cancel()
        if seconds < INFINITE:
            due = loop.time() + seconds
            self._timer = loop.call_later(
                seconds, self._expired, seconds, due, self._desk.own_time() + seconds
            )

    def _expired(self, seconds: float, due: float, own_due: float) -> None:
        now, left = self._desk.loop.time(), own_due - self._desk.own_time()
        if now > due + SLOW_SECONDS:
            self.wait(seconds)  # this process was stopped: received data has not been read yet
        elif left > LEAST_SECONDS:  # it waited for a core
            self._timer = self._desk.loop.call_later(left, self._expired, seconds, now + left, own_due)
        else:
            self.connection.close(f"no handshake within {seconds:g} s")

    @property
    def is_refused(self) -> bool:
        """Whether one side has been refused, with a reason."""
        return self._handshake.state is HandshakeState.REFUSED

    def greet(self, hello: Hello | Stream) -> None:
        """Start the handshake, as the dialler."""
        self._send(self._handshake.greet(hello))

    def welcome(self, session: tuple[int, int] = (1, 0)) -> None:
        """Accept the other side."""
        self._send(self._handshake.welcome(session))

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the other side with a reason, and close the connection."""
        self._send(self._handshake.refuse(refusal))
        self.connection.close("refused", flush=True)

    def finish(self) -> None:
        """End the greeting: the connection has another owner now."""
        self._cancel_timer()
        self._desk.ended(self, None)

    def _send(self, message: HandshakeMessage) -> None:
        buffers, _ = encode(message.kind, 0, message.header, ())
        self.connection.send_unnumbered(b"".join(buffers))

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
                # A stranger's message must not be able to do more than this.
                known = isinstance(error, ProtocolError)
                connection.malformed = is_violation(error)
                unknown = f"a message could not be handled ({type(error).__name__})"
                connection.close(str(error) if known else unknown)
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
