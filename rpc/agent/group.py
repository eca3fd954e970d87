"""The group as one agent sees it: its other workers, the connections to them, and received messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rpc.agent.hooks import Hooks
from rpc.agent.platform import Platform
from rpc.group.connections import Connections
from rpc.group.membership import Membership
from rpc.group.own_time import OwnTime
from rpc.group.peer import Peer, PeerTable
from rpc.group.workers import Member
from rpc.options import AgentOptions
from rpc.runtime.blocking import INFINITE
from rpc.runtime.events import Events
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.serializer import Serializer
from rpc.transport.authentication import TokenAuthenticator

__all__ = ["AgentGroup"]

T = TypeVar("T")


class AgentGroup:
    """The workers of an agent's group, and the connections to them.

    Attributes:
        connections: connections to all workers; for the loop's thread.
        peers: all workers, including this one.
        loop_thread, mailbox: call functions on the loop's thread.
    """

    def __init__(
        self,
        options: AgentOptions,
        platform: Platform,
        mailbox: Mailbox,
        serializer: Serializer,
        events: Events,
        hooks: Hooks,
        authenticator: TokenAuthenticator | None,
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
        self.loop_thread = platform.loop_thread
        self.mailbox = mailbox
        self._serializer = serializer
        self._send_queue_bytes = options.send_queue_bytes

    def listen(self, host: str, port: int) -> list[str]:
        """Listen for other workers; returns the addresses, best first."""
        try:
            return self.loop_thread.call(self.connections.listen, host, port)
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
        if self.loop_thread.is_current():
            self.connections.lose(peer, reason)
        else:
            self.mailbox.call(self.connections.lose, peer, reason)

    def on_loop(self, function: Callable[..., T], *args: object) -> T:
        """Call a function on the loop's thread, and return its result; see ``LoopThread.call``."""
        return self.loop_thread.call(function, *args)

    def _make_peer(self, member: Member) -> Peer:
        return Peer(
            member,
            self._serializer.between(member.safe),
            self._connect,
            send_queue_bytes=self._send_queue_bytes,
            near=member.host == self.peers.view.me.host,
        )

    def _connect(self, peer: Peer) -> None:
        self.mailbox.call(self.connections.dialler.connect, peer)
