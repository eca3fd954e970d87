"""Small messages that must arrive: between agents and the parts built on them, never seen by users.

The messages for one peer that are posted together travel in one frame. The session delivers each frame once
(``rpc.transport.session``), so nothing here is numbered or sent again. What is added is a count: a graceful
shutdown waits until every message has been *handled*, so each batch says how many its sender has handled so
far. The count rides on messages that go the other way; if there are none, it goes alone after ``ACK_SECONDS``
or ``ACK_EVERY`` messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from rpc.errors import ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.mailbox import Mailbox
from rpc.wire.frames import Frame, Kind, encode

__all__ = ["ACK_EVERY", "ACK_SECONDS", "BATCH_MOST", "Control", "TopicHandler"]

logger = logging.getLogger(__name__)

TopicHandler = Callable[[Peer, Any], None]
BatchHandler = Callable[[Peer, list[Any]], None]

ACK_SECONDS: Final = 0.025
"""Maximum time that an acknowledgement waits for a message to ride on, in seconds."""

ACK_EVERY: Final = 64
"""Number of handled messages whose acknowledgement does not wait."""

BATCH_MOST: Final = 512
"""Maximum number of messages in one frame."""


class _Exchange:
    """The messages between this worker and one other: those to send, and counts in both directions.

    Attributes:
        queue: messages that are not in a frame yet.
        posted: number of messages queued or sent.
        acknowledged: number of those that the peer has handled.
        handled: number of messages from the peer that were handled here.
        told: number of those that the peer knows of.
    """

    __slots__ = ("acknowledged", "handled", "posted", "queue", "told")

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.posted = 0
        self.acknowledged = 0
        self.handled = 0
        self.told = 0

    def next_batch(self, *, acknowledge: bool) -> list[Any] | None:
        """The contents of the next frame, if there is one to send; with ``acknowledge`` also if it only
        acknowledges.
        """
        owed = self.handled - self.told
        if not self.queue and owed < (1 if acknowledge else ACK_EVERY):
            return None
        self.told = self.handled
        return [self.handled, [self.queue.popleft() for _ in range(min(len(self.queue), BATCH_MOST))]]

    def take_in(self, batch: object) -> list[Any]:
        """The messages in a batch from the peer. ``ProtocolError`` if the batch is malformed, or acknowledges
        what was never sent.
        """
        match batch:
            case [int(count), list(messages)] if (
                0 <= count <= self.posted - len(self.queue) and len(messages) <= BATCH_MOST
            ):
                self.acknowledged = max(self.acknowledged, count)  # a large batch may have been overtaken
                return messages
        raise ProtocolError(f"a malformed batch of control messages: {str(batch)[:200]}")


class Control:
    """Sends and receives the control messages of one agent. Each arrives exactly once while its receiver
    lives; a large batch may be overtaken.

    ``post`` may be called from any thread, everything else on the loop's thread. ``lose`` is called with a
    peer to which a message cannot be sent, and the reason; ``posted`` counts the messages that were ever
    sent, except those on ``uncounted`` topics, which only query state and start nothing.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox, lose: Callable[[Peer, str], object]
    ) -> None:
        self.posted = 0
        self.uncounted: set[str] = set()
        self._loop = loop
        self._mailbox = mailbox
        self._lose = lose
        self._topics: dict[str, BatchHandler] = {}
        self._exchanges: dict[Peer, _Exchange] = {}
        self._to_flush: dict[Peer, None] = {}
        self._acknowledging = False
        """Whether a timer is set for the acknowledgements that are due."""

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.CONTROL, self.received)

    def on(self, topic: str, handler: TopicHandler) -> None:
        """Register ``handler`` for the messages of a topic; it is called on the loop's thread."""

        def one_by_one(peer: Peer, bodies: list[Any]) -> None:
            while bodies:
                handler(peer, bodies[0])
                del bodies[0]

        self.on_batch(topic, one_by_one)

    def on_batch(self, topic: str, handler: BatchHandler) -> None:
        """Like ``on``, with a list of messages that arrived together. If it raises, it is called again later
        with those that are in the list then: it must take out the others.
        """
        if topic in self._topics:
            raise ValueError(f"topic '{topic}' is taken")
        self._topics[topic] = handler

    def post(self, peer: Peer, topic: str, body: Any) -> None:
        """Send ``body``, anything that msgpack can encode, to a peer. If the peer is gone, it is dropped."""
        self._mailbox.soon(self._post, (peer, topic, body))

    def _post(self, message: tuple[Peer, str, Any]) -> None:
        peer, topic, body = message
        if peer.is_self:
            self._loop.call_soon(self._topics[topic], peer, [body])
        elif peer.lost is None:
            try:
                exchange = self._exchange(peer)
                exchange.queue.append([topic, body])
                exchange.posted += 1
                self.posted += topic not in self.uncounted
                self._flush_soon(peer)
            except MemoryError:
                self._lose(peer, "there is no memory for a control message to it")

    def received(self, peer: Peer, frame: Frame) -> None:
        """Handle a frame of kind ``CONTROL``. If a handler raises, the messages that are not handled are left
        in the frame, which may be passed again.
        """
        exchange = self._exchange(peer)
        messages = exchange.take_in(frame.header.get("batch"))
        count = len(messages)
        by_topic: dict[str, list[Any]] = {}
        for message in messages:
            topic, body = _parse(message)
            by_topic.setdefault(topic, []).append(body)
        try:
            for topic, bodies in by_topic.items():
                handler = self._topics.get(topic)
                if handler is None:
                    raise ProtocolError(f"a control message on topic '{topic}', which has no handler here")
                handler(peer, bodies)
                by_topic[topic] = []
        except Exception:
            messages[:] = [[topic, body] for topic, bodies in by_topic.items() for body in bodies]
            exchange.handled += count - len(messages)
            raise
        exchange.handled += count
        owed = exchange.handled - exchange.told
        if owed >= ACK_EVERY:
            self._flush_soon(peer)
        elif owed and not self._acknowledging:
            self._acknowledging = True
            self._loop.call_later(ACK_SECONDS, self._acknowledge)

    def forget(self, peer: Peer) -> None:
        """The peer is gone: messages on their way to it will not arrive."""
        self._exchanges.pop(peer, None)
        self._to_flush.pop(peer, None)

    def unacknowledged(self) -> int:
        """Number of messages that their receivers have not acknowledged, unsent ones included."""
        return sum(each.posted - each.acknowledged for each in self._exchanges.copy().values())

    def peers(self) -> list[Peer]:
        """Return the workers that have messages to acknowledge. On the loop's thread."""
        return [peer for peer, each in self._exchanges.items() if each.posted > each.acknowledged]

    def _exchange(self, peer: Peer) -> _Exchange:
        exchange = self._exchanges.get(peer)
        if exchange is None:
            exchange = self._exchanges[peer] = _Exchange()
        return exchange

    def _flush_soon(self, peer: Peer) -> None:
        if not self._to_flush:
            self._loop.call_soon(self._flush)
        self._to_flush[peer] = None

    def _flush(self) -> None:
        peers, self._to_flush = self._to_flush, {}
        for peer in peers:
            self._send_batches(peer, acknowledge=False)

    def _acknowledge(self) -> None:
        self._acknowledging = False
        for peer in list(self._exchanges):
            self._send_batches(peer, acknowledge=True)

    def _send_batches(self, peer: Peer, *, acknowledge: bool) -> None:
        exchange = self._exchanges.get(peer)
        if exchange is None:
            return
        try:
            while (batch := exchange.next_batch(acknowledge=acknowledge)) is not None:
                buffers, size = encode(Kind.CONTROL, 0, {"batch": batch}, ())
                peer.send(buffers, size, wait=False)
        except WorkerLostError:
            pass  # ``forget`` follows
        except Exception as error:
            # Repeating it would not help, and code that relies on it must learn of the failure.
            logger.exception("a control message to worker '%s' cannot be sent", peer.name)
            self._lose(peer, f"a control message to it cannot be sent: {error}")


def _parse(message: object) -> tuple[str, Any]:
    match message:
        case [str(topic), body]:
            return topic, body
    raise ProtocolError(f"a malformed control message: {str(message)[:200]}")
