"""The messages of one agent: kinds, sending, control messages, and bulk data."""

from __future__ import annotations

from dataclasses import dataclass

from rpc.agent.dispatcher import Dispatcher, KindHandler, Sender
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.shared_memory.exchange import SharedMemory
from rpc.bulk.streams import BulkStreams
from rpc.group.control import Control
from rpc.wire.frames import Kind

__all__ = ["Messages"]


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of one agent.

    Attributes:
        dispatcher: handles received messages.
        sender: sends messages.
        control: small messages that must arrive.
        bulk: messages into buffers that are posted for them.
        shared_memory, bulk_streams: transports for large messages.
    """

    dispatcher: Dispatcher
    sender: Sender
    control: Control
    bulk: Bulk
    shared_memory: SharedMemory
    bulk_streams: BulkStreams

    def on(
        self, kind: int, handler: KindHandler, *, any_thread: bool = False, followed: bool = False
    ) -> None:
        """Register ``handler`` for messages of another kind; see ``Dispatcher.on``.

        Raises:
            ValueError: the kind has a handler, or is below ``Kind.EXTENSION``.
        """
        if kind < Kind.EXTENSION:
            raise ValueError(f"message kind {kind} is reserved")
        self.dispatcher.on(kind, handler, any_thread=any_thread, followed=followed)
