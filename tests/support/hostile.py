"""A peer that does not play by the rules: raw connections to a worker, with or without its handshake."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rpc.group.handshake import Handshake, HandshakeMessage, Hello
from rpc.group.workers import Member, WorkerInfo
from rpc.runtime.current import current_agent
from rpc.transport.authentication import Role, TokenAuthenticator
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE, Frame, Kind, encode

_PATIENCE = 20.0
"""Seconds for what must come; well below a run's time limit."""


def frame(
    kind: int, header: dict[Any, Any], segments: Sequence[bytes] = (), call_id: int = 1, codec: int = 0
) -> bytes:
    """The bytes of one well-formed frame."""
    buffers, _ = encode(kind, call_id, header, segments, codec)
    return b"".join(bytes(buffer) for buffer in buffers)


@dataclass(frozen=True)
class Target:
    """What a worker knows of itself, and who wants to talk to it must know."""

    member: Member
    group: str
    authenticator: TokenAuthenticator | None = None


def target() -> Target:
    """To be called remotely: what one needs to know to attack this worker."""
    agent = current_agent()
    return Target(
        agent.group.peers.view.me, agent.group.connections.group, agent.group.connections.authenticator
    )


class Hostile:
    r"""A connection to a worker, as a context manager.

    Args:
        at: the worker.
        scheme: of the address to connect to.

    Example::

        with Hostile(at) as peer:
            peer.say(b"GET / HTTP/1.1\r\n\r\n")
            assert peer.is_hung_up()
    """

    def __init__(self, at: Target, scheme: str = "unix") -> None:
        self.at = at
        address = next(each for each in at.member.addresses if each.startswith(f"{scheme}:"))
        if scheme == "unix":
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(b"\0" + address.removeprefix("unix:@").encode())
        else:
            host, _, port = address.removeprefix("tcp:").rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(_PATIENCE)
        self._decoder = Decoder(1 << 20)
        self._frames: list[Frame] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *data: bytes) -> None:
        """Send bytes; that the worker has hung up meanwhile is not noticed here."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(b"".join(data))

    def hear(self) -> Frame | None:
        """The next frame; ``None`` if the worker hangs up instead."""
        while not self._frames:
            try:
                count = self.socket.recv_into(self._decoder.buffer())
            except ConnectionResetError:
                return None
            if not count:
                return None
            self._frames = self._decoder.received(count)
        return self._frames.pop(0)

    def hear_all(self) -> list[Frame]:
        """All frames until the worker hangs up."""
        return list(iter(self.hear, None))

    def is_hung_up(self) -> bool:
        """Whether the worker says nothing more and hangs up."""
        return self.hear_all() == []

    def hello(self, member: Member, **changes: Any) -> bytes:
        """The bytes with which ``member`` asks to be let in."""
        header = {"member": member.to_wire(), "wanted": self.at.member.incarnation, "group": self.at.group}
        return PREAMBLE + frame(Kind.HELLO, header | changes, call_id=0)

    def newcomer(self, number: int) -> Member:
        """Somebody who could join the worker's dynamic group."""
        info = WorkerInfo(f"evil{number}", 1000 + number)
        return replace(self.at.member, info=info, incarnation=secrets.randbits(62), addresses=())

    def join(self, member: Member) -> None:
        """Shake hands as ``member``, who must be welcome."""
        answer = self.shake_hands(member)
        assert answer is not None
        assert answer.kind == Kind.WELCOME, answer.header

    def shake_hands(self, member: Member, **changes: Any) -> Frame | None:
        """Say hello as ``member``, with changes to it, and prove to belong to the job; the answer."""
        handshake = Handshake(Role.DIALLER, self.at.authenticator)
        hello = handshake.greet(Hello(member, self.at.member.incarnation, self.at.group, **changes))
        self.say(PREAMBLE, frame(hello.kind, hello.header, call_id=0))
        answer = self.hear()
        if answer is None or answer.kind != Kind.CHALLENGE:
            return answer
        proof = handshake.receive(answer.kind, answer.header)
        assert isinstance(proof, HandshakeMessage)
        self.say(frame(proof.kind, proof.header, call_id=0))
        return self.hear()
