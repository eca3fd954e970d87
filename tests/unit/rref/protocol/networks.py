"""How control messages travel between simulated workers: each once, in whatever order the driver likes.

That it is so over connections that break is for sessions and their tests.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgpack

from rref.protocol.messages import Peer


class Violation(AssertionError):
    """The protocol broke a promise."""


class Receiver(Protocol):
    """Where messages arrive."""

    def receive(self, src: Peer, dst: Peer, message: Any) -> None:
        """``message`` arrives at ``dst``."""


class Network:
    def __init__(self) -> None:
        self.posted: list[tuple[Peer, Peer, Any]] = []

    def post(self, src: Peer, dst: Peer, message: Any) -> None:
        self.posted.append((src, dst, msgpack.unpackb(msgpack.packb(message))))

    def deliver(self, to: Receiver, index: int) -> None:
        """The message at ``index`` arrives."""
        to.receive(*self.posted.pop(index))

    def cut(self, src: Peer, dst: Peer) -> None:
        """What is on its way from ``src`` to ``dst`` is lost for ever: one of them is dead."""
        self.posted = [each for each in self.posted if each[:2] != (src, dst)]

    def deliver_all(self, to: Receiver) -> bool:
        """Deliver what there is; false if there was nothing."""
        any_posted = bool(self.posted)
        while self.posted:
            self.deliver(to, 0)
        return any_posted
