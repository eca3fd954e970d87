"""A simulated group for tests that tell a story: the test says what arrives when."""

from __future__ import annotations

from rref.protocol.machine import Protocol
from rref.protocol.messages import Peer, Ref, RRefId, State
from tests.unit.rref.protocol.simulation import Simulation


class Group(Simulation):
    """Workers 1, 2, 3 ..., whose messages arrive when the test says so."""

    @property
    def said(self) -> list[tuple[Peer, Peer, str]]:
        """The control messages on their way: from, to, kind."""
        return [(src, dst, message[0]) for src, dst, message in self.network.posted]

    def deliver(self, *kinds: str, to: Peer | None = None) -> None:
        """What is on its way now arrives: messages of these kinds, or all; to that worker, or all."""
        now, self.network.posted = self.network.posted, []
        for each in now:
            _, dst, message = each
            if (kinds and message[0] not in kinds) or (to is not None and dst != to):
                self.network.posted.append(each)
            else:
                self.receive(*each)

    def deliver_everything(self) -> None:
        """Control messages arrive until there are none."""
        self.network.deliver_all(self)

    def pass_on(self, peer: Peer, to: Peer, ref: Ref) -> Ref:
        """A call with ``ref`` goes from ``peer`` to ``to`` and arrives; returns the new reference there."""
        self.call(peer, to, [ref])
        self.arrive(-1)
        return list(self.workers[to].refs)[-1]

    def own_and_pass_on(self, to: Peer) -> tuple[RRefId, Ref]:
        """Worker 1 owns an object, passes it on, and drops it; returns it, and the reference at ``to``."""
        rref = self.own(1)
        there = self.pass_on(1, to, rref)
        self.release(1, rref)
        return rref, there

    def protocol(self, peer: Peer) -> Protocol:
        """The protocol of ``peer``."""
        return self.workers[peer].protocol

    def state(self, peer: Peer, ref: Ref) -> State:
        """How a reference of ``peer`` stands."""
        return self.protocol(peer).state(ref)

    def is_freed(self, rref: RRefId) -> bool:
        """Whether the owner was told to free the object."""
        return self.objects[rref].freed

    def remembered(self, peer: Peer) -> dict[str, int]:
        """What ``peer`` remembers; empty if nothing."""
        return {kind: count for kind, count in self.protocol(peer).counts().items() if count}

    def assert_nothing_left(self) -> None:
        """No living worker remembers anything, and nothing is on its way."""
        assert self.said == []
        assert {peer: left for peer in self.living if (left := self.remembered(peer))} == {}
