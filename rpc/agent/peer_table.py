"""The other workers, and this one: who is there, by name and by incarnation."""

from __future__ import annotations

from collections.abc import Callable

from rpc.agent.hooks import Hooks
from rpc.group.membership import Membership, WorkerReference
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.runtime import file_limit
from rpc.runtime.events import Events, PeerJoined

__all__ = ["PeerTable"]


class PeerTable:
    """The peers of one agent. Looking up is for any thread, everything else for the loop's.

    Args:
        make: makes the peer of a member.
        connect: begins to connect to a peer; from any thread, and twice does no harm.
        hooks, events: told who joins.

    Attributes:
        view: who is in the group; set by ``form``.
        own: this worker's peer for itself; set by ``form``.
        by_incarnation: returns a peer, present or gone; None if it was never in the group.
    """

    view: Membership
    own: Peer

    def __init__(
        self,
        make: Callable[[Member], Peer],
        connect: Callable[[Peer], None],
        hooks: Hooks,
        events: Events,
    ) -> None:
        self._make = make
        self._connect = connect
        self._hooks = hooks
        self._events = events
        self._peers: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self.by_incarnation: Callable[[int], Peer | None] = self._peers.get

    def form(self, view: Membership, own: Peer) -> None:
        """The group is formed; from any thread, since nobody else knows of it yet."""
        self.view = view
        self._peers[own.incarnation] = self.own = own

    def find(self, worker: WorkerReference) -> Peer:
        """The peer that a name, an id or a ``WorkerInfo`` means.

        Raises:
            UnknownWorkerError: there is no such worker in the group.
            ValueError: it is none of these.
        """
        if type(worker) is str:  # nothing else: 1.0 and True would be found under 1
            peer = self._by_name.get(worker)
            if peer is not None and peer.lost is None:  # else another may have the name now
                return peer
        peer = self._peers[self.view.resolve(worker).incarnation]
        self._by_name[peer.name] = peer
        return peer

    def ensure(self, member: Member) -> Peer:
        """The peer of a member, made if need be."""
        peer = self._peers.get(member.incarnation)
        if peer is None:
            file_limit.provide_for(len(self._peers))
            peer = self._peers[member.incarnation] = self._make(member)
            self._by_name.clear()
            for handler in self._hooks.joined:
                handler(peer)
            if self._events.peer_joined:
                self._events.tell(self._events.peer_joined, PeerJoined(member.name, member.id))
        return peer

    def leave(self, peer: Peer, reason: str) -> None:
        """A worker is gone for good."""
        self.view.leave(peer.incarnation, reason)
        self._by_name.clear()

    def watch_over(self, peer: Peer) -> None:
        """Be connected to a peer from now on, so that its death is noticed though nothing is sent to it."""
        if not peer.connected:
            self._connect(peer)

    def present(self) -> list[Peer]:
        """Everybody who is in the group now."""
        return [self.ensure(member) for member in self.view.present()]

    def all(self) -> list[Peer]:
        """Everybody who has ever been in the group."""
        return list(self._peers.values())
