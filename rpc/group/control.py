"""Small messages that must arrive: between agents and what stands on them, never seen by users.

The shell round ``delivery``: it puts the messages of each peer into frames, several at once where they come
together, and looks after the one timer that acknowledgements and repetitions need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from rpc.errors import ProtocolError, WorkerLostError
from rpc.group.delivery import Delivery
from rpc.group.peer import Peer
from rpc.runtime.mailbox import Mailbox
from rpc.wire.frames import Frame, Kind, encode

__all__ = ["Control", "TopicHandler"]

logger = logging.getLogger(__name__)

TopicHandler = Callable[[Peer, Any], None]
BatchHandler = Callable[[Peer, list[Any]], None]


class Control:
    """Delivers each message exactly once while its receiver lives; order is not kept.

    ``post`` may be called from any thread, everything else on the loop's thread.

    Args:
        loop: the agent's.
        mailbox: what brings work to that loop.
        lose: called with a peer to which a message cannot be sent, and why.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox, lose: Callable[[Peer, str], object]
    ) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._lose = lose
        self._topics: dict[str, BatchHandler] = {}
        self._links: dict[Peer, Delivery] = {}
        self._to_flush: set[Peer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self.posted = 0
        """How many messages were ever sent."""

    def on(self, topic: str, handler: TopicHandler) -> None:
        """Have the messages of a topic passed to ``handler``, on the loop's thread."""

        def one_by_one(peer: Peer, bodies: list[Any]) -> None:
            for body in bodies:
                handler(peer, body)

        self.on_batch(topic, one_by_one)

    def on_batch(self, topic: str, handler: BatchHandler) -> None:
        """As ``on``, with a list of messages that arrived together."""
        if topic in self._topics:
            raise ValueError(f"topic '{topic}' is taken")
        self._topics[topic] = handler

    def post(self, peer: Peer, topic: str, body: Any) -> None:
        """Send ``body``, anything msgpack can encode, to a peer. To one that is gone it is dropped."""
        self._mailbox.soon(self._post, (peer, topic, body))

    def _post(self, message: tuple[Peer, str, Any]) -> None:
        peer, topic, body = message
        if peer.is_self:
            self._loop.call_soon(self._topics[topic], peer, [body])
            return
        if peer.lost is not None:
            return
        delivery = self._links.get(peer)
        if delivery is None:
            delivery = self._links[peer] = Delivery()
        delivery.send([topic, body])
        self.posted += 1
        if not self._to_flush:
            self._loop.call_soon(self._flush)
        self._to_flush.add(peer)

    def received(self, peer: Peer, frame: Frame) -> None:
        """Take in a frame of kind ``CONTROL``."""
        delivery = self._links.get(peer)
        if delivery is None:
            delivery = self._links[peer] = Delivery()
        messages = delivery.received(frame.header.get("batch"), time.monotonic())
        by_topic: dict[str, list[Any]] = {}
        for message in messages:
            topic, body = _parse(message)
            by_topic.setdefault(topic, []).append(body)
        for topic, bodies in by_topic.items():
            handler = self._topics.get(topic)
            if handler is None:
                raise ProtocolError(f"a control message on topic '{topic}', which nobody here follows")
            handler(peer, bodies)
        self._set_timer(delivery.next_due())

    def forget(self, peer: Peer) -> None:
        """The peer is gone: what is on its way to it will not arrive."""
        self._links.pop(peer, None)
        self._to_flush.discard(peer)

    def unacknowledged(self) -> int:
        """How many messages their receivers have not yet acknowledged."""
        return sum(delivery.unacknowledged for delivery in self._links.copy().values())

    def _flush(self) -> None:
        peers, self._to_flush = self._to_flush, set()
        for peer in peers:
            delivery = self._links.get(peer)
            if delivery is not None:
                self._send_batches(peer, delivery)

    def _send_batches(self, peer: Peer, delivery: Delivery) -> None:
        now = time.monotonic()
        try:
            while (batch := delivery.outgoing(now)) is not None:
                buffers, size = encode(Kind.CONTROL, 0, {"batch": batch}, ())
                peer.send(buffers, size, wait=False)
        except WorkerLostError:
            return  # ``forget`` follows
        except Exception as error:
            # Repeating it would not help, and those who rely on it must know.
            logger.exception("a control message to worker '%s' cannot be sent", peer.name)
            self._lose(peer, f"a control message to it cannot be sent: {error}")
            return
        self._set_timer(delivery.next_due())

    def _set_timer(self, due: float | None) -> None:
        if due is None or due >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        delay = max(0.0, due - time.monotonic())
        self._timer = self._loop.call_later(delay, self._timer_rang)

    def _timer_rang(self) -> None:
        self._timer = None
        self._due = float("inf")
        now = time.monotonic()
        for peer, delivery in list(self._links.items()):
            due = delivery.next_due()
            if due is not None and due <= now:
                self._send_batches(peer, delivery)
            else:
                self._set_timer(due)


def _parse(message: object) -> tuple[str, Any]:
    match message:
        case [str(topic), body]:
            return topic, body
    raise ProtocolError(f"a control message that cannot be: {str(message)[:200]}")
