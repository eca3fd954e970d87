"""The messages of one agent: kinds, sending, control messages, and bulk data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpc.agent.activity import Activity
from rpc.agent.dispatcher import Dispatcher, KindHandler, Sender
from rpc.agent.group import AgentGroup
from rpc.agent.hooks import Hooks
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.bulk.streams import BulkStreams
from rpc.group.control import Control
from rpc.group.heartbeat import Heartbeat
from rpc.options import AgentOptions
from rpc.runtime.events import Events
from rpc.runtime.tasks import Task
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Kind

__all__ = ["Messages"]


class Messages:
    """The messages of one agent.

    Args:
        run_soon: has tasks run on executor threads.

    Attributes:
        dispatcher: handles received messages.
        sender: sends messages.
        control: small messages that must arrive.
        bulk: messages into buffers that are posted for them.
        shared_memory, bulk_streams: transports for large messages.
        heartbeat: notices workers that are silent.
    """

    def __init__(
        self,
        options: AgentOptions,
        group: AgentGroup,
        serializer: Serializer,
        events: Events,
        activity: Activity,
        hooks: Hooks,
        run_soon: Callable[[Sequence[Task]], object],
    ) -> None:
        loop, mailbox, connections = group.loop_thread.loop, group.mailbox, group.connections
        self.dispatcher = dispatcher = Dispatcher(
            serializer, events, activity, run_soon, group.lose, mailbox.later
        )
        self.control = control = Control(loop, mailbox, connections.lose)
        self.shared_memory = shared_memory = SharedMemory(
            loop,
            mailbox.call,
            connections.lose,
            bound=options.shared_memory_bytes,
            max_message_bytes=options.max_message_bytes,
            takes=serializer.allow is None,
        )
        self.bulk_streams = streams = BulkStreams(
            loop,
            mailbox,
            connections,
            dispatcher.frames_received,
            dispatcher.take_bulk,
            options.tcp_stripes,
            options.max_message_bytes,
            options.send_queue_bytes,
        )
        self.bulk = bulk = Bulk(shared_memory.send, streams.consider, group.lose)
        self.sender = Sender(serializer, events, activity, shared_memory.send, streams.consider, group.lose)
        self.heartbeat = heartbeat = Heartbeat(
            loop,
            group.peers.all,
            connections.lose,
            dispatcher.message_lost,
            connections.dialler.greet_again,
            options.lost_after,
            connections.own_time,
            connections.neighbours,
        )
        heartbeat.interests.append(lambda: (peer for each in hooks.awaited for peer in each()))
        for part in (connections, control, shared_memory, streams, bulk, heartbeat):
            part.register(dispatcher.on)
        dispatcher.unwrap(Kind.IN_SEGMENT, shared_memory.unwrap)
        dispatcher.on_lost(
            (Kind.BULK,), lambda peer, call_id, _: run_soon([(bulk.send_again, (peer, call_id))])
        )
        activity.add(control.unacknowledged, lambda: control.posted)
        hooks.awaited.extend((control.peers, bulk.peers))
        hooks.broke.extend((streams.peer_broke, bulk.peer_broke))
        hooks.gone.append(lambda peer, _: control.forget(peer))
        hooks.gone.extend((shared_memory.peer_gone, streams.peer_gone, bulk.peer_gone))
        hooks.closed.append(bulk.close)
        hooks.forked.extend((bulk.abandon, shared_memory.abandon, streams.abandon))

    def on(self, kind: int, handler: KindHandler, *, any_thread: bool = False) -> None:
        """Register ``handler`` for messages of another kind; see ``Dispatcher.on``.

        Raises:
            ValueError: the kind has a handler, or is below ``Kind.EXTENSION``.
        """
        if kind < Kind.EXTENSION:
            raise ValueError(f"message kind {kind} is reserved")
        self.dispatcher.on(kind, handler, any_thread=any_thread)
