"""What makes messages arrive exactly once between two living workers, whatever becomes of their connections.

Both ends number the messages of each direction, from 1, in the order in which they go over a connection: no
number is on the wire. A sender keeps each message until the receiver has said how many it has taken in, every
``ACKNOWLEDGE_EVERY`` messages, or when the heartbeat finds that some are not acknowledged. When a connection
breaks, the handshake of the next tells each side how many the other has taken in; what is beyond is sent
again, in the same order, before anything else. So nothing is lost, and nothing comes twice.

*Large messages*, which go in chunks, are not numbered, and not kept: they may lie in memory of the user's,
which may change. They have numbers of their own, and their receiver says which have arrived (``ARRIVED``, or
``BULK_CREDIT``, which are ordinary messages). What had not arrived as a whole is dropped there when the
connection breaks. Each side says when it has sent again what was missing (*resumed*): of the large messages
that began before, those that are not known to have arrived then are lost, and whoever has sent them is told.

*What is kept is bounded.* A session is *full* when what is not acknowledged takes more than
``MAX_UNACKNOWLEDGED``, twice what a receiver lets come before it acknowledges. Callers wait then, as they do
for a queue that is full: a receiver whose acknowledgements are only slow goes on getting what it can take.
One that acknowledges nothing for as long as a silent one may be silent is lost (``rpc.group.heartbeat``).
Nothing is reckoned where a *light* message is sent, and nobody looks while there are ``FEW``.

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

__all__ = ["ACKNOWLEDGE_EVERY", "FEW", "LIGHT_BYTES", "MAX_UNACKNOWLEDGED", "Session"]

ACKNOWLEDGE_EVERY: Final = 128

MAX_UNACKNOWLEDGED: Final = 64 << 20
"""In bytes. A message costs its own, and ``LIGHT_BYTES`` at least, so there are at most 2¹⁶."""

LIGHT_BYTES: Final = 1 << 10
"""A message that is no longer needs to be in ``sent`` only."""

FEW: Final = MAX_UNACKNOWLEDGED // WHOLE_BYTES - 1
"""So many messages cannot be too much: a message in one frame is no longer than ``WHOLE_BYTES``."""


class Session:
    """One end.

    Attributes:
        sent: messages that were begun to be written and are not acknowledged, in order. One that is light may
            be appended as it is, by whoever writes; others are noted.
        kept: how many bytes they cost.
        got_room: called when it is full no more, if somebody has found it full, on any thread.
        connections: number of connections so far.
        received: number of messages taken in, except those that belong to one connection only.
        heard: number of messages and heartbeats taken in, as a sign of life.
        numbers: of large messages.
        large: the beginnings of those that are under way, by number, and the connection that they began on.

    Example::

        session.note(b"first")
        session.note(b"second")
        session.acknowledged(1)
        assert session.resume(1, [b"third"]) == [b"second", b"third"]
    """

    __slots__ = (
        *("_acknowledge_at", "_found_full", "_heavy_dropped", "_heavy_noted", "_progress", "_unnumbered"),
        *("connections", "first", "got_room", "large", "numbers", "received", "sent"),
    )

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()
        self.got_room: Callable[[], object] = int
        self._found_full = False
        # What messages cost beyond ``LIGHT_BYTES``, in all:
        self._heavy_noted = 0  # only writers change it, one at a time
        self._heavy_dropped = 0  # only who reads changes it
        self.first = 0
        """How many messages are acknowledged and dropped."""
        self.connections = 0
        self.received = 0
        self._unnumbered = 0
        """Heartbeats, and large messages, taken in."""
        self._acknowledge_at = ACKNOWLEDGE_EVERY
        self._progress = 0
        """Messages received and acknowledged when the newest connection began."""
        self.numbers = itertools.count(1)
        self.large: dict[int, tuple[int, bytes]] = {}

    @property
    def kept(self) -> int:
        return len(self.sent) * LIGHT_BYTES + self._heavy_noted - self._heavy_dropped

    # ---- what is received; for the thread that reads

    def take_in(self) -> bool:
        """A message is taken in; returns whether the sender is to be told by now (``acknowledging``)."""
        self.received += 1
        return self.received >= self._acknowledge_at

    def take_in_heartbeat(self) -> None:
        """A frame is taken in that has no number, such as a large message. From any thread."""
        self._unnumbered += 1

    @property
    def heard(self) -> int:
        return self.received + self._unnumbered

    @property
    def owes(self) -> bool:
        """Whether messages were taken in since the last acknowledgement."""
        return self.received + ACKNOWLEDGE_EVERY != self._acknowledge_at

    def acknowledging(self) -> int:
        """The sender is about to be told: returns the number of messages taken in."""
        self._acknowledge_at = self.received + ACKNOWLEDGE_EVERY
        return self.received

    @property
    def has_progressed(self) -> bool:
        """Whether anything was taken in or acknowledged over the newest connection."""
        return self.received + self.first != self._progress

    # ---- what is sent

    def note(self, message: bytes) -> None:
        """A message is begun to be written, behind all others."""
        self._heavy_noted += max(0, len(message) - LIGHT_BYTES)
        self.sent.append(message)

    def is_full(self) -> bool:
        """Whether so much is kept that senders are to wait; ``got_room`` is called then when it is not any
        more. From any thread.
        """
        if self.kept <= MAX_UNACKNOWLEDGED:
            return False
        self._found_full = True
        return self.kept > MAX_UNACKNOWLEDGED  # an acknowledgement may have come just before

    def acknowledged(self, count: int) -> None:
        """The receiver has taken in so many, in all. Those whose writers have not noted them yet, as may be
        for a moment, are dropped with the next acknowledgement.
        """
        sent = self.sent
        for _ in range(min(count - self.first, len(sent))):
            size = len(sent.popleft())
            if size > LIGHT_BYTES:
                self._heavy_dropped += size - LIGHT_BYTES
            self.first += 1
        if self._found_full and self.kept <= MAX_UNACKNOWLEDGED:
            self._found_full = False
            self.got_room()

    def connect(self, number: int, count: int, unsent: Iterable[bytes]) -> list[bytes]:
        """A connection begins, the ``number``-th; returns what is to be sent over it first, and raises, as
        ``resume`` does.
        """
        again = self.resume(count, unsent) if number > 1 else []
        self.connections = number
        self._progress = self.received + self.first
        return again

    def resume(self, count: int, unsent: Iterable[bytes]) -> list[bytes]:
        """A new connection begins, and nothing writes to the last: returns what is to be sent over it first.

        Args:
            count: how many messages the receiver has taken in.
            unsent: those that were not begun to be written, as far as is known: what encrypts may have
                written the first of several that it was given together, and tell of none.

        Raises:
            ProtocolError: the receiver cannot have taken in so many, or so few.
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
        """A large message begins, of which these are prefix, table and header; returns its number."""
        number = next(self.numbers)
        self.large[number] = self.connections, head
        return number

    def bulk_arrived(self, call_id: int) -> None:
        """The large bulk message of this call id has arrived. From any thread."""
        for number, (_, head) in self.large.copy().items():
            if is_bulk(head, call_id):
                self.large.pop(number, None)

    def take_lost(self) -> list[bytes]:
        """The other side has resumed: the beginnings of the large messages that are lost."""
        lost = [number for number, (on, _) in self.large.copy().items() if on < self.connections]
        return [self.large.pop(number)[1] for number in lost]
