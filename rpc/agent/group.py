"""The group as one agent sees it: its other workers, the connections to them, and received messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rpc.agent.departure import Departure
from rpc.agent.dispatcher import Dispatcher
from rpc.agent.hooks import Hooks
from rpc.agent.platform import Platform
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.streams import BulkStreams
from rpc.group.connections import Connections
from rpc.group.handshake import Authenticator
from rpc.group.membership import Membership
from rpc.group.own_time import OwnTime
from rpc.group.peer import Peer, PeerTable
from rpc.group.workers import Member
from rpc.options import AgentOptions
from rpc.runtime.blocking import INFINITE
from rpc.runtime.events import Events
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.serializer import Serializer

__all__ = ["AgentGroup", "Reception"]

T = TypeVar("T")


class AgentGroup:
    """The workers of an agent's group, and the connections to them.

    Attributes:
        connections: connections to all workers; for the loop's thread.
            peers: all workers, including this one.
    """

    def __init__(
        self,
        options: AgentOptions,
        platform: Platform,
        mailbox: Mailbox,
        serializer: Serializer,
        events: Events,
        hooks: Hooks,
        authenticator: Authenticator | None,
    ) -> None:
        self.connections = Connections(
            platform.loop_thread.loop,
            platform.transports,
            options.max_message_bytes,
            authenticator,
            handshake_seconds=INFINITE,  # heartbeats apply a timeout
            reconnect_seconds=options.reconnect_within,
            own_time=OwnTime(platform.loop_thread.loop.time, platform.waited_for_core),
        )
        self.peers = PeerTable(
            self._make_peer, self._connect, hooks.joined, events, platform.loop_thread.call
        )
        self._loop_thread = platform.loop_thread
        self._mailbox = mailbox
        self._serializer = serializer
        self._send_queue_bytes = options.send_queue_bytes

    def listen(self, host: str, port: int) -> list[str]:
        """Listen for other workers; returns the addresses, best first."""
        try:
            return self._loop_thread.call(self.connections.listen, host, port)
        except OSError as error:
            reason = f"cannot listen on {host!r}, port {port}: {error.strerror or error}"
            raise OSError(error.errno, reason) from error

    def form(self, me: Member, *, static: bool) -> None:
        """Set the group that was formed, in which this worker is ``me``; ``join`` follows."""
        own = Peer(me, self._serializer.between(me.safe), self._connect, is_self=True)
        self.connections.loop_back(own)
        self.peers.form(Membership(me, static=static), own)

    def join(self, members: Sequence[Member], key: str) -> None:
        """Join the group, with the members known so far. On the loop's thread."""
        for member in members:
            self.peers.view.join(member)
        self.peers.present()
        self.connections.join_group(self.peers.view, key)

    def lose(self, peer: Peer, reason: str) -> None:
        """Cut a worker off. From any thread; immediately if on the loop's."""
        if self._loop_thread.is_current():
            self.connections.lose(peer, reason)
        else:
            self._mailbox.call(self.connections.lose, peer, reason)

    def on_loop(self, function: Callable[..., T], *args: object) -> T:
        """Call a function on the loop's thread, and return its result; see ``LoopThread.call``."""
        return self._loop_thread.call(function, *args)

    def _make_peer(self, member: Member) -> Peer:
        return Peer(
            member,
            self._serializer.between(member.safe),
            self._connect,
            send_queue_bytes=self._send_queue_bytes,
            near=member.host == self.peers.view.me.host,
        )

    def _connect(self, peer: Peer) -> None:
        self._mailbox.call(self.connections.connect, peer)


class Reception:
    """Handles what connections receive: the ``ConnectionEvents`` of an agent."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        bulk: Bulk,
        bulk_streams: BulkStreams,
        peers: PeerTable,
        departure: Departure,
        hooks: Hooks,
        events: Events,
    ) -> None:
        self.followed = dispatcher.followed
        self.frames_received = dispatcher.frames_received
        self.take_inline = dispatcher.take_inline
        self.find_target = bulk.find_target
        self.stream_came = bulk_streams.stream_came
        self.peer_for = peers.ensure
        self._peers = peers
        self._departure = departure
        self._hooks = hooks
        self._events = events

    def peer_broke(self, peer: Peer) -> None:
        """Handle that the connection to a worker broke, and is made again."""
        for handler in self._hooks.broke:
            handler(peer)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """End everything under way with a worker that is gone for good."""
        self._peers.leave(peer, reason)
        for handler in list(self._hooks.gone):  # one may be removed in the meantime
            handler(peer, reason)
        self._departure.worker_gone(peer)
        tell = self._events.peer_lost
        if tell is not None:
            tell(peer.name, peer.member.id, reason)
