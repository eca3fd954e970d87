"""How control messages travel between simulated workers: as they should, or over the worst of links."""

from __future__ import annotations

from typing import Any
from typing import Protocol as Interface

import msgpack

from rpc.group.delivery import Delivery
from rref.protocol.messages import Peer


class Violation(AssertionError):
    """The protocol broke a promise."""


class Receiver(Interface):
    """Where messages arrive."""

    def receive(self, src: Peer, dst: Peer, message: Any) -> None:
        """``message`` arrives at ``dst``."""

    def hears(self, peer: Peer, src: Peer) -> bool:
        """Whether ``peer`` lives and has not lost ``src``."""


class Network(Interface):
    """How control messages travel."""

    def post(self, src: Peer, dst: Peer, message: Any) -> None:
        """``src`` has something to say to ``dst``."""

    def cut(self, src: Peer, dst: Peer) -> None:
        """What is on its way from ``src`` to ``dst`` is lost for ever: one of them is dead."""

    def interrupt(self, one: Peer, other: Peer) -> None:
        """The connection between two living workers breaks, and is made anew."""

    def deliver_all(self, to: Receiver) -> bool:
        """Lose nothing from now on, and deliver what there is; false if there was nothing."""


class ExactNetwork:
    """Delivers each message once, in whatever order the driver likes."""

    def __init__(self) -> None:
        self.posted: list[tuple[Peer, Peer, Any]] = []

    def post(self, src: Peer, dst: Peer, message: Any) -> None:
        self.posted.append((src, dst, msgpack.unpackb(msgpack.packb(message))))

    def deliver(self, to: Receiver, index: int) -> None:
        """The message at ``index`` arrives."""
        src, dst, message = self.posted.pop(index)
        to.receive(src, dst, message)

    def cut(self, src: Peer, dst: Peer) -> None:
        self.posted = [each for each in self.posted if each[:2] != (src, dst)]

    def interrupt(self, one: Peer, other: Peer) -> None:
        pass

    def deliver_all(self, to: Receiver) -> bool:
        any_posted = bool(self.posted)
        while self.posted:
            self.deliver(to, 0)
        return any_posted


class HostileNetwork:
    """Breaks connections, doubles and reorders; ``rpc.group.delivery`` must make up for it."""

    def __init__(self) -> None:
        self.ends: dict[tuple[Peer, Peer], Delivery] = {}
        self.flying: list[tuple[Peer, Peer, bytes]] = []

    def _end(self, here: Peer, there: Peer) -> Delivery:
        return self.ends.setdefault((here, there), Delivery())

    def post(self, src: Peer, dst: Peer, message: Any) -> None:
        self._end(src, dst).send(message)

    def write(self, *, acknowledge: bool) -> None:
        """Every end writes what is due; with ``acknowledge`` also the acknowledgements that it owes."""
        for (src, dst), end in list(self.ends.items()):
            while (batch := end.outgoing(acknowledge=acknowledge)) is not None:
                self.flying.append((src, dst, msgpack.packb(batch)))

    def deliver(self, to: Receiver, index: int, keep: bool = False) -> None:
        """The batch at ``index`` arrives; with ``keep``, it will once more."""
        src, dst, batch = self.flying[index] if keep else self.flying.pop(index)
        if not to.hears(dst, src):
            return
        for message in self._end(dst, src).received(msgpack.unpackb(batch)):
            to.receive(src, dst, message)

    def lose(self, index: int) -> None:
        """The batch at ``index`` never arrives: its connection breaks, and is made anew."""
        self.interrupt(*self.flying[index][:2])

    def cut(self, src: Peer, dst: Peer) -> None:
        self.flying = [each for each in self.flying if each[:2] != (src, dst)]
        self.ends.pop((dst, src), None)

    def interrupt(self, one: Peer, other: Peer) -> None:
        self.flying = [each for each in self.flying if {*each[:2]} != {one, other}]
        self._end(one, other).reconnected()
        self._end(other, one).reconnected()

    def deliver_all(self, to: Receiver) -> bool:
        delivered = False
        for _ in range(1000):
            self.write(acknowledge=True)
            if not self.flying:
                return delivered
            delivered = True
            while self.flying:
                self.deliver(to, 0)
        raise Violation("the ends say something again and again")
