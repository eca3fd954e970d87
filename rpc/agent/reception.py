"""What an agent does with the frames and the news that its connections bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpc.agent.departure import Departure
from rpc.agent.hooks import Hooks
from rpc.agent.messages import Messages
from rpc.group.handshake import Stream
from rpc.group.peer import Peer, PeerTable
from rpc.group.workers import Member
from rpc.runtime.events import Events
from rpc.runtime.tasks import Task
from rpc.transport.base import Connection
from rpc.wire.frames import Frame
from rpc.wire.targets import Target

__all__ = ["Reception"]


class Reception:
    """Handles what connections receive: the ``ConnectionEvents`` of an agent."""

    def __init__(
        self, messages: Messages, peers: PeerTable, departure: Departure, hooks: Hooks, events: Events
    ) -> None:
        self._messages = messages
        self._peers = peers
        self._departure = departure
        self._hooks = hooks
        self._events = events

    @property
    def take_inline(self) -> Callable[..., Task | None]:
        """See ``Dispatcher.take_inline``. A connection gets the method once, and then calls it directly."""
        return self._messages.dispatcher.take_inline

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        self._messages.dispatcher.frames_received(peer, frames)

    def find_target(self, peer: Peer, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        return self._messages.bulk.find_target(peer, kind, call_id, sizes)

    def stream_came(self, connection: Connection, stream: Stream) -> Callable[[], object]:
        return self._messages.bulk_streams.stream_came(connection, stream)

    def peer_for(self, member: Member) -> Peer:
        return self._peers.ensure(member)

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
