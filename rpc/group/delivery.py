"""Control messages between two workers: numbered, so that each is delivered once, and acknowledged.

There is one ``Delivery`` at each end of a pair of incarnations, for as long as both live. Sessions
(``rpc.transport.session``) ensure that no message is lost, even when a connection is made again. Batches may
overtake each other, as large ones are sent in chunks, and tests inject duplicates (``rpc.testing.faults``).
Still, every message passed to ``send`` at one end is returned by ``received`` at the other exactly once, in
any order; and each end knows how many the other has received, which a graceful shutdown waits for.

Messages are numbered from 1 in each direction. A batch is ``[acked, start, messages]``: all numbers up to
``acked`` have arrived here; ``messages`` have the numbers ``start``, ``start + 1``, and so on. So every batch
carries an acknowledgement, and no separate one is sent if messages flow both ways. Otherwise the receiver
delays it (see ``Control``), but for at most ``ACK_EVERY`` messages. At most ``WINDOW`` numbers are in flight,
so a receiver remembers at most that many to detect duplicates; further messages wait at the sender.

A dead peer is forgotten by dropping its ``Delivery``; incarnations never come back, so nothing is kept.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Final

from rpc.errors import ProtocolError

__all__ = ["ACK_EVERY", "BATCH_MOST", "WINDOW", "Batch", "Delivery"]

Batch = list[Any]
"""``[acked, start, messages]``; msgpack can encode it if it can encode the messages."""

ACK_EVERY: Final = 64
WINDOW: Final = 4096
BATCH_MOST: Final = 512


class Delivery:
    """One end of the exactly-once exchange between two living workers. For one thread; no I/O, no clock.

    Each batch that ``outgoing`` returns goes into a frame; what is read goes through ``received``.

    Example::

        here, there = Delivery(), Delivery()
        here.send(["delete", [7, 1]])
        batch = here.outgoing()
        assert there.received(batch) == [["delete", [7, 1]]]
        assert there.received(batch) == []  # a duplicate
        assert here.received(there.outgoing(acknowledge=True)) == []
        assert here.unacknowledged == 0
    """

    __slots__ = ("_arrived", "_beyond", "_first", "_queue", "_sent", "_unanswered")

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()
        """Messages that are not acknowledged, from number ``_first`` on; the first ``_sent`` are in
        flight.
        """
        self._first = 1
        self._sent = 0
        self._arrived = 0
        """All numbers up to this one have arrived, and those in ``_beyond``."""
        self._beyond: set[int] = set()
        self._unanswered = 0

    @property
    def unacknowledged(self) -> int:
        """Number of messages that the peer has not acknowledged yet, including those not yet sent."""
        return len(self._queue)

    @property
    def owes(self) -> bool:
        """Whether a received message is not acknowledged yet."""
        return self._unanswered > 0

    @property
    def is_due(self) -> bool:
        """Whether ``outgoing`` has a batch that should not wait."""
        return self._unanswered >= ACK_EVERY or self._sent < min(len(self._queue), WINDOW)

    def send(self, message: Any) -> None:
        """Queue one message for the next ``outgoing``."""
        self._queue.append(message)

    def outgoing(self, *, acknowledge: bool = False) -> Batch | None:
        """Return the next batch to send to the peer, or None. With ``acknowledge``, a batch is returned even
        if it only acknowledges and is not due yet.
        """
        if not self.is_due and not (acknowledge and self._unanswered):
            return None
        end = min(len(self._queue), WINDOW, self._sent + BATCH_MOST)
        batch = [self._arrived, self._first + self._sent, list(islice(self._queue, self._sent, end))]
        self._sent = end
        self._unanswered = 0
        return batch

    def received(self, batch: object) -> list[Any]:
        """Handle a batch from the peer, as ``outgoing`` made it; returns its messages that are new. Raises
        ``ProtocolError`` if it is malformed, or has impossible numbers or acknowledgements; then nothing of
        it has been accepted.
        """
        match batch:
            case [int(acked), int(start), list(messages)] if (
                0 <= acked < self._first + self._sent
                and len(messages) <= BATCH_MOST
                and 1 <= start <= self._arrived + WINDOW + 1 - len(messages)
            ):
                pass
            case _:
                raise ProtocolError(
                    f"a peer sent a batch of control messages that cannot be: {str(batch)[:200]}"
                )
        while self._first <= acked:
            self._queue.popleft()
            self._first += 1
            self._sent -= 1
        new = [message for number, message in enumerate(messages, start) if self._is_new(number)]
        self._unanswered += len(messages) if len(new) == len(messages) else ACK_EVERY
        return new

    def _is_new(self, number: int) -> bool:
        if number <= self._arrived or number in self._beyond:
            return False
        self._beyond.add(number)
        while self._arrived + 1 in self._beyond:
            self._arrived += 1
            self._beyond.remove(self._arrived)
        return True
