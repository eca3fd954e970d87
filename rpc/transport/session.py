"""Exactly-once delivery of messages between two living workers, across the loss of their connections.

Both ends number the messages of each direction, from 1, in the order in which they go over a connection; the
numbers are not sent. A sender keeps each message until the receiver has acknowledged it. The receiver
acknowledges every ``ACKNOWLEDGE_EVERY`` messages, and when the heartbeat finds that some are not
acknowledged. When a connection breaks, the handshake of the next tells each side how many messages the other
has received; the later ones are sent again, in the same order, before anything else. So no message is lost,
and none arrives twice.

*Large messages*, which are sent in chunks, are neither numbered nor kept: they may be in memory of the
user's, which may change. They have numbers of their own, and their receiver reports which have arrived
(``ARRIVED``, or ``BULK_CREDIT``, which are ordinary messages). A receiver drops incomplete ones when the
connection breaks. Each side reports when it has sent again what was missing (*resumed*). The large messages
that began before, and are not known to have arrived by then, are lost, and their senders are notified.

*The memory is bounded.* A session is *full* when its unacknowledged messages take more than
``MAX_UNACKNOWLEDGED``, twice what a receiver accepts before it acknowledges. Callers then wait, as for a
queue that is full. A receiver whose acknowledgements are only slow continues to receive what it can take. One
that acknowledges nothing for as long as a silent one may be silent is lost (``rpc.group.heartbeat``). Sizes
are not counted for *short* messages, and the limit is not checked while there are at most ``FEW`` messages.

No I/O; see ``rpc.group.peer`` for which thread calls what.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from rpc.errors import ProtocolError
from rpc.wire.chunking import WHOLE_BYTES
from rpc.wire.frames import is_bulk

__all__ = ["ACKNOWLEDGE_EVERY", "FEW", "MAX_UNACKNOWLEDGED", "SHORT_BYTES", "Session"]

ACKNOWLEDGE_EVERY: Final = 128

MAX_UNACKNOWLEDGED: Final = 64 << 20
"""Maximum size in bytes of the unacknowledged messages. Each counts for at least ``SHORT_BYTES``, so there
are at most 2¹⁶.
"""

SHORT_BYTES: Final = 1 << 10
"""Maximum size in bytes of a short message, which needs an entry in ``sent`` only."""

FEW: Final = MAX_UNACKNOWLEDGED // WHOLE_BYTES - 1
"""Number of messages that cannot exceed the limit: a message in one frame is no longer than ``WHOLE_BYTES``.
"""


class Session:
    """One end of a session.

    Attributes:
        sent: messages that were begun to be written and are not acknowledged, in order. The writing thread
            may append a short one directly; others are added by ``note``.
        kept: size of these messages in bytes.
        got_room: called when the session is no longer full, if it was found full, on any thread.
        connections: number of connections so far.
        received: number of messages received, except those that belong to one connection only.
        acknowledge_at: number of received messages at which they must be acknowledged.
        heard: number of messages and heartbeats received, as a sign of life.
        numbers: numbers of large messages.
        large: the beginnings of large messages in progress, by number, each with the connection that it began
            on.

    Example::

        session.note(b"first")
        session.note(b"second")
        session.acknowledged(1)
        assert session.resume(1, [b"third"]) == [b"second", b"third"]
    """

    __slots__ = (
        *("_found_full", "_heavy_dropped", "_heavy_noted", "_progress", "_unnumbered"),
        *("acknowledge_at", "connections", "first", "got_room", "large", "numbers", "received", "sent"),
    )

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()
        self.got_room: Callable[[], object] = int
        self._found_full = False
        # Total cost of messages beyond ``SHORT_BYTES`` each:
        self._heavy_noted = 0  # changed by writers only, one at a time
        self._heavy_dropped = 0  # changed by the reading thread only
        self.first = 0
        """Number of messages that are acknowledged and dropped."""
        self.connections = 0
        self.received = 0
        self._unnumbered = 0
        """Number of heartbeats and large messages received."""
        self.acknowledge_at = ACKNOWLEDGE_EVERY
        self._progress = 0
        """Number of messages received and acknowledged when the newest connection began."""
        self.numbers = itertools.count(1)
        self.large: dict[int, tuple[int, bytes]] = {}

    @property
    def kept(self) -> int:
        return len(self.sent) * SHORT_BYTES + self._heavy_noted - self._heavy_dropped

    # ---- what is received; for the thread that reads

    def take_in(self) -> bool:
        """Record that a message was received; returns whether it must be acknowledged now
        (``acknowledging``).
        """
        self.received += 1
        return self.received >= self.acknowledge_at

    def take_in_heartbeat(self) -> None:
        """Record that a frame without a number was received, such as a large message. From any thread."""
        self._unnumbered += 1

    @property
    def heard(self) -> int:
        return self.received + self._unnumbered

    @property
    def owes(self) -> bool:
        """Whether messages were received since the last acknowledgement."""
        return self.received + ACKNOWLEDGE_EVERY != self.acknowledge_at

    def acknowledging(self) -> int:
        """Return the number of messages received, which is sent as an acknowledgement now."""
        self.acknowledge_at = self.received + ACKNOWLEDGE_EVERY
        return self.received

    @property
    def has_progressed(self) -> bool:
        """Whether anything was received or acknowledged over the newest connection."""
        return self.received + self.first != self._progress

    # ---- what is sent

    def note(self, message: bytes) -> None:
        """Record a message that is begun to be written, behind all others."""
        self._heavy_noted += max(0, len(message) - SHORT_BYTES)
        self.sent.append(message)

    def is_full(self) -> bool:
        """Whether senders must wait, since too much is unacknowledged; if so, ``got_room`` is called when
        that is no longer the case. From any thread.
        """
        if self.kept <= MAX_UNACKNOWLEDGED:
            return False
        self._found_full = True
        return self.kept > MAX_UNACKNOWLEDGED  # an acknowledgement may have come just before

    def acknowledged(self, count: int) -> None:
        """Drop the first ``count`` messages of all, which the receiver has received. If the writing threads
        have not noted some of them yet, as is possible for a moment, these are dropped with the next
        acknowledgement.
        """
        sent = self.sent
        for _ in range(min(count - self.first, len(sent))):
            size = len(sent.popleft())
            if size > SHORT_BYTES:
                self._heavy_dropped += size - SHORT_BYTES
            self.first += 1
        if self._found_full and self.kept <= MAX_UNACKNOWLEDGED:
            self._found_full = False
            self.got_room()

    def connect(self, number: int, count: int, unsent: Iterable[bytes]) -> list[bytes]:
        """Begin connection ``number``; returns what must be sent over it first. Raises like ``resume``."""
        again = self.resume(count, unsent) if number > 1 else []
        self.connections = number
        self._progress = self.received + self.first
        return again

    def resume(self, count: int, unsent: Iterable[bytes]) -> list[bytes]:
        """Begin a new connection, when nothing writes to the last one; returns what must be sent over it
        first.

        Args:
            count: number of messages that the receiver has received.
            unsent: messages that were not begun to be written, as far as is known: a stream with encryption
                may have written the first of several that it was given together, and report none.

        Raises:
            ProtocolError: ``count`` is impossible.
        """
        for message in unsent:
            self.note(message)
        if not self.first <= count <= self.first + len(self.sent):
            raise ProtocolError(
                f"it has taken in {count} messages, of {self.first + len(self.sent)}, where it had said "
                f"{self.first} before"
            )
        self.acknowledged(count)
        again = list(self.sent)
        self.sent.clear()
        self._heavy_noted = self._heavy_dropped = 0
        return again

    def begin_large(self, head: bytes) -> int:
        """Begin a large message with this prefix, table and header; returns its number."""
        number = next(self.numbers)
        self.large[number] = self.connections, head
        return number

    def bulk_arrived(self, call_id: int) -> None:
        """Record that the large bulk message with this call id has arrived. From any thread."""
        for number, (_, head) in self.large.copy().items():
            if is_bulk(head, call_id):
                self.large.pop(number, None)

    def take_lost(self) -> list[bytes]:
        """Return the beginnings of the large messages that are lost, once the other side has resumed."""
        lost = [number for number, (on, _) in self.large.copy().items() if on < self.connections]
        return [self.large.pop(number)[1] for number in lost]
