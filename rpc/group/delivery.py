"""Exactly-once delivery of small control messages between two workers, over a link that may fail.

One ``Delivery`` stands at each end of a pair of incarnations, for as long as both live. Between them the
link may lose batches, double them, bring them late or out of order, and be torn down and made anew; every
message handed to ``send`` at one end still comes out of ``received`` at the other exactly once. Order is
not kept: what arrives is handed over at once, whatever is missing before it.

How it works
    * Messages are numbered from 1 in each direction. A batch is ``[acked, ranges, start, messages]``: all
      numbers up to ``acked`` have arrived here, and so have those in ``ranges`` (pairs ``[low, high]``,
      both included); ``messages`` have the numbers ``start``, ``start + 1``, and so on.
    * Every batch carries the acknowledgement, so where messages flow both ways none travels alone. Where
      they flow one way only, the receiver answers ``ACK_DELAY`` after the first message not yet
      acknowledged, or at once when ``ACK_EVERY`` of them have come or one came twice (its sender missed
      the last acknowledgement). That is at most 40 small frames a second on a one-way stream of any
      rate up to 2,560 messages a second, one frame in 64 messages beyond, and none on an idle link.
    * What is not acknowledged within ``RESEND_FIRST`` is sent again, then after twice that, and so on up
      to ``RESEND_MOST``; any progress resets it. On a stream socket nothing is lost while it lives, so
      this is for links that fail silently; when a new connection is made, ``reconnected`` resends at once.
    * At most ``WINDOW`` numbers are on their way, so a receiver remembers at most that many to tell what
      came twice. What exceeds it waits at the sender.

Nothing here reads a clock or touches a socket: ``now`` is passed in (seconds, any monotonic clock).
A dead peer is forgotten by dropping its ``Delivery``; incarnations never come back, so nothing is kept.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Final

from rpc.errors import ProtocolError

__all__ = ["Batch", "Delivery"]

Batch = list[Any]
"""``[acked, ranges, start, messages]``; msgpack can encode it if it can encode the messages."""

ACK_DELAY: Final = 0.025
ACK_EVERY: Final = 64
RESEND_FIRST: Final = 1.0
RESEND_MOST: Final = 30.0
WINDOW: Final = 4096
BATCH_MOST: Final = 512
RANGES_MOST: Final = 32


class Delivery:
    """One end of the exactly-once exchange between two living workers.

    Not thread-safe: one thread uses it, or all that do hold one lock.

    The shell calls ``outgoing`` after ``send``, whenever it writes to the peer anyway, and when
    ``next_due`` says so, again and again until it returns ``None``; each batch goes into a frame. What it
    reads goes through ``received``.

    Example::

        here, there = Delivery(), Delivery()
        here.send(["delete", [7, 1]])
        batch = here.outgoing(now=0.0)
        assert there.received(batch, now=0.1) == [["delete", [7, 1]]]
        assert there.received(batch, now=0.2) == []  # came twice
        assert here.received(there.outgoing(now=0.3), now=0.4) == []  # the acknowledgement
        assert here.unacknowledged == 0
    """

    __slots__ = (
        "_ack_at",
        "_acked",
        "_beyond",
        "_flying",
        "_next",
        "_resend",
        "_resend_after",
        "_resend_at",
        "_unanswered",
        "_unsent",
    )

    def __init__(self) -> None:
        # Sending: numbers are given when a message first leaves; _flying is in their order.
        self._unsent: deque[Any] = deque()
        self._flying: dict[int, Any] = {}
        self._next = 1
        self._resend: deque[int] = deque()
        self._resend_at: float | None = None
        self._resend_after = RESEND_FIRST
        # Receiving: all numbers up to _acked, and those in _beyond.
        self._acked = 0
        self._beyond: set[int] = set()
        self._unanswered = 0
        self._ack_at: float | None = None

    @property
    def unacknowledged(self) -> int:
        """How many messages the peer has not yet acknowledged, those not yet sent included."""
        return len(self._unsent) + len(self._flying)

    def send(self, message: Any) -> None:
        """Queue one message; the next ``outgoing`` takes it along."""
        self._unsent.append(message)

    def outgoing(self, now: float) -> Batch | None:
        """The next batch to write to the peer, or ``None`` if nothing need be sent now.

        Args:
            now: the time, in seconds.
        """
        if self._resend_at is not None and self._resend_at <= now:
            self._resend_after = min(2 * self._resend_after, RESEND_MOST)
            self._send_all_again(now)
        start, messages = self._next_run()
        if not messages and (self._ack_at is None or self._ack_at > now):
            return None
        if messages and self._resend_at is None:
            self._resend_at = now + self._resend_after
        self._ack_at = None
        self._unanswered = 0
        return [self._acked, self._ranges() if self._beyond else [], start, messages]

    def received(self, batch: object, now: float) -> list[Any]:
        """Take in a batch from the peer; returns the messages that are new, in the batch's order.

        Args:
            batch: as ``outgoing`` made it, decoded.
            now: the time, in seconds.

        Raises:
            ProtocolError: the batch is malformed, or acknowledges or numbers what it cannot. Nothing of
                it has been taken in then.
        """
        acked, ranges, start, messages = self._checked(batch)
        self._take_acknowledgement(acked, ranges, now)
        if not messages:
            return messages
        if start == self._acked + 1 and not self._beyond:
            self._acked += len(messages)
            new = messages
        else:
            new = [message for n, message in enumerate(messages, start) if self._is_new(n)]
        self._unanswered += len(messages)
        if len(new) < len(messages) or self._unanswered >= ACK_EVERY:
            self._ack_at = now
        elif self._ack_at is None:
            self._ack_at = now + ACK_DELAY
        return new

    def next_due(self) -> float | None:
        """When ``outgoing`` should next be called: a time, ``-inf`` for at once, ``None`` for not at all."""
        if self._resend or (self._unsent and self._window_left() > 0):
            return float("-inf")
        if self._ack_at is None or self._resend_at is None:
            return self._ack_at if self._resend_at is None else self._resend_at
        return min(self._ack_at, self._resend_at)

    def reconnected(self, now: float) -> None:
        """A new connection replaces the last: send at once whatever is not acknowledged.

        Args:
            now: the time, in seconds.
        """
        self._resend_after = RESEND_FIRST
        if self._flying:
            self._send_all_again(now)

    # Sending

    def _send_all_again(self, now: float) -> None:
        self._resend = deque(self._flying)
        self._resend_at = now + self._resend_after

    def _next_run(self) -> tuple[int, list[Any]]:
        """Messages with consecutive numbers, at most ``BATCH_MOST``: first those due again, then new ones."""
        again = self._resend
        while again and again[0] not in self._flying:
            again.popleft()
        messages: list[Any] = []
        if again:
            start = again[0]
            while again and again[0] == start + len(messages) and len(messages) < BATCH_MOST:
                number = again.popleft()
                if number not in self._flying:
                    break
                messages.append(self._flying[number])
            return start, messages
        start = self._next
        if self._unsent:
            for _ in range(min(len(self._unsent), self._window_left(), BATCH_MOST)):
                message = self._unsent.popleft()
                self._flying[self._next] = message
                self._next += 1
                messages.append(message)
        return start, messages

    def _window_left(self) -> int:
        oldest = next(iter(self._flying), self._next)
        return oldest + WINDOW - self._next

    def _take_acknowledgement(self, acked: int, ranges: list[list[int]], now: float) -> None:
        flying = self._flying
        if not flying:
            return
        before = len(flying)
        while flying and (oldest := next(iter(flying))) <= acked:
            del flying[oldest]
        for low, high in ranges:
            for number in range(low, high + 1):
                flying.pop(number, None)
        if len(flying) < before:
            self._resend_after = RESEND_FIRST
            self._resend_at = now + RESEND_FIRST if flying else None

    # Receiving

    def _checked(self, batch: object) -> tuple[int, list[list[int]], int, list[Any]]:
        match batch:
            case [int(acked), list(ranges), int(start), list(messages)] if (
                0 <= acked < self._next
                and len(ranges) <= RANGES_MOST
                and len(messages) <= BATCH_MOST
                and start >= 1
                and start + len(messages) - 1 <= self._acked + WINDOW
                and (not ranges or all(self._is_range(each) for each in ranges))
            ):
                return acked, ranges, start, messages
        raise ProtocolError(f"a peer sent a batch of control messages that cannot be: {str(batch)[:200]}")

    def _is_range(self, each: object) -> bool:
        match each:
            case [int(low), int(high)]:
                return 1 <= low <= high < self._next and high - low < WINDOW
        return False

    def _is_new(self, number: int) -> bool:
        if number <= self._acked or number in self._beyond:
            return False
        self._beyond.add(number)
        while self._acked + 1 in self._beyond:
            self._acked += 1
            self._beyond.remove(self._acked)
        return True

    def _ranges(self) -> list[list[int]]:
        """What has arrived beyond ``_acked``, as the lowest ``RANGES_MOST`` ranges."""
        ranges: list[list[int]] = []
        for number in islice(sorted(self._beyond), WINDOW):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            elif len(ranges) == RANGES_MOST:
                break
            else:
                ranges.append([number, number])
        return ranges
