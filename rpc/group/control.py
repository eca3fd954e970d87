"""Control messages: small messages between agents and the packages above them, delivered reliably.

The shell around ``delivery``: it puts the messages for each peer into frames, several at once if possible,
and delays acknowledgements, so that most are sent with messages in the other direction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from rpc.errors import ProtocolError, WorkerLostError
from rpc.group.delivery import Delivery
from rpc.group.peer import Peer
from rpc.runtime.mailbox import Mailbox
from rpc.wire.frames import Frame, Kind, encode

__all__ = ["ACK_SECONDS", "Control", "TopicHandler"]

logger = logging.getLogger(__name__)

TopicHandler = Callable[[Peer, Any], None]
BatchHandler = Callable[[Peer, list[Any]], None]

ACK_SECONDS: Final = 0.025
"""Maximum time in seconds that an acknowledgement waits for a message to be sent with."""


class Control:
    """Delivers each message exactly once while its receiver lives; order is not kept.

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
        self._deliveries: dict[Peer, Delivery] = {}
        self._to_flush: dict[Peer, None] = {}
        self._acknowledging = False
        """Whether a timer is set for the acknowledgements that are due."""

    def on(self, topic: str, handler: TopicHandler) -> None:
        """Register ``handler`` for the messages of a topic; it is called on the loop's thread."""

        def one_by_one(peer: Peer, bodies: list[Any]) -> None:
            for body in bodies:
                handler(peer, body)

        self.on_batch(topic, one_by_one)

    def on_batch(self, topic: str, handler: BatchHandler) -> None:
        """Like ``on``, with a list of messages that arrived together."""
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
            self._delivery(peer).send([topic, body])
            self.posted += topic not in self.uncounted
            self._flush_soon(peer)

    def received(self, peer: Peer, frame: Frame) -> None:
        """Handle a frame of kind ``CONTROL``."""
        delivery = self._delivery(peer)
        by_topic: dict[str, list[Any]] = {}
        for message in delivery.received(frame.header.get("batch")):
            topic, body = _parse(message)
            by_topic.setdefault(topic, []).append(body)
        for topic, bodies in by_topic.items():
            handler = self._topics.get(topic)
            if handler is None:
                raise ProtocolError(f"a control message on topic '{topic}', which has no handler here")
            handler(peer, bodies)
        if delivery.is_due:
            self._flush_soon(peer)
        elif delivery.owes and not self._acknowledging:
            self._acknowledging = True
            self._loop.call_later(ACK_SECONDS, self._acknowledge)

    def forget(self, peer: Peer) -> None:
        """Drop the messages to a peer that is gone."""
        self._deliveries.pop(peer, None)
        self._to_flush.pop(peer, None)

    def unacknowledged(self) -> int:
        """Number of messages that their receivers have not acknowledged yet."""
        return sum(delivery.unacknowledged for delivery in self._deliveries.copy().values())

    def peers(self) -> list[Peer]:
        """Return the workers that have messages to acknowledge. On the loop's thread."""
        return [peer for peer, delivery in self._deliveries.items() if delivery.unacknowledged]

    def _delivery(self, peer: Peer) -> Delivery:
        delivery = self._deliveries.get(peer)
        if delivery is None:
            delivery = self._deliveries[peer] = Delivery()
        return delivery

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
        for peer, delivery in list(self._deliveries.items()):
            if delivery.owes:
                self._send_batches(peer, acknowledge=True)

    def _send_batches(self, peer: Peer, *, acknowledge: bool) -> None:
        delivery = self._deliveries.get(peer)
        if delivery is None:
            return
        try:
            while (batch := delivery.outgoing(acknowledge=acknowledge)) is not None:
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
    raise ProtocolError(f"a control message that cannot be: {str(message)[:200]}")
