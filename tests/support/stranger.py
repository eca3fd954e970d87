"""Whoever connects to a worker's TCP address without being a worker of ours."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from rpc.group.handshake import Hello
from rpc.group.workers import Member
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE, Frame, Kind, encode
from tests.support.members import member
from tests.support.nodes import GROUP, Node
from tests.support.streams import SOON


class Stranger:
    """Whoever connects over TCP, and says what a test wants said."""

    def __init__(self, node: Node) -> None:
        _, host, port = node.member.addresses[-1].split(":")
        self.socket = socket.create_connection((host, int(port)), SOON)
        self._decoder = Decoder(1 << 20)

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say_hello(self, hello: Hello) -> None:
        self.say(PREAMBLE + frame(Kind.HELLO, hello.header()))

    def hear(self, count: int = 1000) -> list[Frame]:
        """What the worker says, until there are so many frames or it closes."""
        frames: list[Frame] = []
        while len(frames) < count:
            received = self.socket.recv_into(self._decoder.buffer())
            if not received:
                break
            frames += self._decoder.received(received)
        return frames

    def is_cut_off(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            self.hear()
        return True

    def close(self) -> None:
        self.socket.close()


def frame(kind: int, header: dict[str, Any], *segments: bytes) -> bytes:
    return b"".join(encode(kind, 0, header, segments)[0])


def hello_to(node: Node, who: Member | None = None, *, wanted: int = 0, group: str = GROUP) -> Hello:
    """A hello to that worker, by somebody whom it does not know unless told otherwise."""
    return Hello(who or member("stranger", 9, 900), wanted or node.member.incarnation, group)
