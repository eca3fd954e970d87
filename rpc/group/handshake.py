"""The handshake of two workers before the first call: a state machine without I/O.

The side that connects, the *dialler*, says hello: who it is, which worker it wants (by incarnation, so that a
message for a worker that has since been replaced is refused) and the group that it belongs to. The other
side, the *acceptor*, may ask for a proof that the dialler belongs to the job. It answers with a welcome, with
a proof of its own if it asked for one, or with a refusal and the reason. The two alternate, so both ends step
through the same table, ``TRANSITIONS``; a message that is not in it ends the connection::

    dialler                                           acceptor
    HELLO      member, wanted, group              ->  or STREAM  token, number
                                                  <-  CHALLENGE              only with an authenticator
    PROOF                                         ->  likewise
                                                  <-  WELCOME or REFUSED

The content of CHALLENGE, PROOF and WELCOME is up to the authenticator; each proof is over a digest of all
previous messages, including the identities. Everything that affects the order of messages is in this file;
``admission`` decides which workers are accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.group.workers import Member
from rpc.runtime.legible import legible
from rpc.transport.authentication import Role, TokenAuthenticator
from rpc.wire.frames import Kind
from rpc.wire.headers import pack_header

__all__ = [
    "TRANSITIONS",
    "Handshake",
    "HandshakeMessage",
    "HandshakeState",
    "Hello",
    "Refusal",
    "Stream",
    "Welcomed",
    "parse_refusal",
]


class HandshakeState(Enum):
    """The last message of the handshake."""

    BEGUN = "nothing was said"
    GREETED = "the dialler has said hello"
    CHALLENGED = "the acceptor wants a proof"
    PROVEN = "the dialler has given one"
    WELCOMED = "the connection is established"
    REFUSED = "the acceptor closes the connection"


TRANSITIONS: Final[Mapping[HandshakeState, Mapping[int, HandshakeState]]] = {
    HandshakeState.BEGUN: {Kind.HELLO: HandshakeState.GREETED, Kind.STREAM: HandshakeState.GREETED},
    HandshakeState.GREETED: {
        Kind.CHALLENGE: HandshakeState.CHALLENGED,
        Kind.WELCOME: HandshakeState.WELCOMED,
        Kind.REFUSED: HandshakeState.REFUSED,
    },
    HandshakeState.CHALLENGED: {Kind.PROOF: HandshakeState.PROVEN},
    HandshakeState.PROVEN: {Kind.WELCOME: HandshakeState.WELCOMED, Kind.REFUSED: HandshakeState.REFUSED},
    HandshakeState.WELCOMED: {},
    HandshakeState.REFUSED: {},
}
"""The next state by the kind of a message, whoever sends it."""

_SAID_BY: Final = {
    Kind.HELLO: (Role.DIALLER, "hello"),
    Kind.STREAM: (Role.DIALLER, "stream"),
    Kind.CHALLENGE: (Role.ACCEPTOR, "challenge"),
    Kind.PROOF: (Role.DIALLER, "proof"),
    Kind.WELCOME: (Role.ACCEPTOR, "welcome"),
    Kind.REFUSED: (Role.ACCEPTOR, "refused"),
}
"""The sender of each kind of message, and its name."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialler's first message; the acceptor answers with ``welcome`` or ``refuse``."""

    member: Member
    wanted: int
    group: str
    session: tuple[int, int] = (0, 0)
    """Number of connections that it has had to this worker, and of messages that it has received."""

    def header(self) -> dict[str, Any]:
        said = {"member": self.member.to_wire(), "wanted": self.wanted, "group": self.group}
        return said | ({"session": list(self.session)} if any(self.session) else {})

    @classmethod
    def parse(cls, header: dict[str, Any]) -> Hello:
        """Parse a header; raises ``ProtocolError`` if it is not a hello."""
        try:
            member, wanted, group = Member.from_wire(header["member"]), header["wanted"], header["group"]
        except (KeyError, TypeError, ValueError) as error:
            said = str(error)[:300]
            raise ProtocolError(f"a malformed hello: {type(error).__name__}: {said}") from error
        if not isinstance(wanted, int) or not isinstance(group, str):
            raise ProtocolError("a malformed hello: wrong types")
        return cls(member, wanted, group, _session(header, (0, 0)))


@dataclass(frozen=True, slots=True)
class Stream:
    """Sent instead of a hello: this is to be one of several connections to a worker that is connected
    already.
    """

    token: bytes
    number: int

    def header(self) -> dict[str, Any]:
        return {"token": self.token, "number": self.number}

    @classmethod
    def parse(cls, header: dict[str, Any]) -> Stream:
        """Parse a header; raises ``ProtocolError`` if it is not one of a stream."""
        match header:
            case {"token": bytes(token), "number": int(number)}:
                return cls(token, number)
        raise ProtocolError("a malformed stream")


@dataclass(frozen=True, slots=True)
class HandshakeMessage:
    """A message to be sent."""

    kind: int
    header: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Welcomed:
    """At the dialler: the connection is established. ``session``: number of this connection, and number of
    messages that the acceptor has received.
    """

    session: tuple[int, int] = (1, 0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a hello: a code for programs, a reason for people on the other side, who may be
    strangers, and a detail for the log of this side only.
    """

    code: str
    reason: str
    detail: str = ""

    def header(self) -> dict[str, Any]:
        return {"code": self.code, "reason": self.reason}


NOT_PROVEN: Final = Refusal("stranger", "it does not belong to this job: its proof is wrong")


class Handshake:
    """One side of one handshake.

    Args:
        role: the side.
        authenticator: None if knowing the group and the incarnation is enough. Both sides have one, or
        neither.
    """

    def __init__(self, role: Role, authenticator: TokenAuthenticator | None = None) -> None:
        self.role = role
        self.state = HandshakeState.BEGUN
        self._authenticator = authenticator
        self._said = hashlib.sha256()
        self._hello: Hello | Stream | None = None

    def greet(self, hello: Hello | Stream) -> HandshakeMessage:
        """At the dialler: return the first message."""
        return self._say(Kind.HELLO if isinstance(hello, Hello) else Kind.STREAM, hello.header())

    def welcome(self, session: tuple[int, int] = (1, 0)) -> HandshakeMessage:
        """At the acceptor: accept the other side, whose hello ``receive`` has returned; ``session`` is as in
        ``Welcomed``.
        """
        said = {} if session == (1, 0) else {"session": list(session)}
        if self._authenticator is not None:
            said |= self._authenticator.prove(self.role, self._said.digest())
        return self._say(Kind.WELCOME, said)

    def refuse(self, refusal: Refusal) -> HandshakeMessage:
        """At the acceptor: refuse the other side."""
        return self._say(Kind.REFUSED, refusal.header())

    def receive(
        self, kind: int, header: dict[str, Any]
    ) -> HandshakeMessage | Hello | Stream | Welcomed | Refusal:
        """Handle a message; returns what to do. A refusal at the acceptor is to be sent. Raises
        ``ProtocolError`` if the message is malformed or not expected now: the connection is to be closed.
        """
        before = self.state
        self._step(kind, received=True)
        authenticator, said = self._authenticator, self._said.digest()
        self._note(kind, header)
        match kind:
            case Kind.HELLO | Kind.STREAM:
                self._hello = Hello.parse(header) if kind == Kind.HELLO else Stream.parse(header)
                if authenticator is None:
                    return self._hello
                return self._say(Kind.CHALLENGE, authenticator.challenge())
            case Kind.CHALLENGE:
                if authenticator is None:
                    raise ProtocolError("it wants a proof, which this worker has not been given")
                return self._say(Kind.PROOF, authenticator.prove(self.role, self._said.digest()))
            case Kind.PROOF:
                assert authenticator is not None
                assert self._hello is not None
                return self._hello if authenticator.verify(Role.DIALLER, said, header) else NOT_PROVEN
            case Kind.WELCOME:
                if authenticator is not None and (
                    before is not HandshakeState.PROVEN
                    or not authenticator.verify(Role.ACCEPTOR, said, header)
                ):
                    raise ProtocolError("it has not proven that it belongs to this job")
                return Welcomed(_session(header, (1, 0)))
        return parse_refusal(header)

    def _say(self, kind: int, header: dict[str, Any]) -> HandshakeMessage:
        self._step(kind, received=False)
        self._note(kind, header)
        return HandshakeMessage(kind, header)

    def _step(self, kind: int, *, received: bool) -> None:
        possible = TRANSITIONS[self.state]
        if kind not in possible or (_SAID_BY[kind][0] is self.role) is received:
            said_by = [_SAID_BY[each] for each in possible]
            expected = " or ".join(name for role, name in said_by if role is not self.role)
            raise ProtocolError(f"expected {expected or 'nothing'}, got a frame of kind {kind}")
        self.state = possible[kind]

    def _note(self, kind: int, header: dict[str, Any]) -> None:
        if self._authenticator is not None:
            self._said.update(bytes([kind]) + pack_header(header))


def _session(header: dict[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    match header.get("session", list(default)):
        case [int(connections), int(received)] if 0 <= connections < 1 << 63 and 0 <= received < 1 << 63:
            return connections, received
    raise ProtocolError("a malformed account of messages")


def parse_refusal(header: dict[str, Any]) -> Refusal:
    """Parse the refusal of a peer; tolerant, since it is only displayed."""
    return Refusal(str(header.get("code", "")), legible(header.get("reason", "no reason given")))
