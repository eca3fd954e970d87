"""The order in which messages fill posted buffers, and the limit of what a sender may send ahead. Pure.

A *stream* has all messages that one worker sends to one other under one tag. The messages are numbered,
modulo 2^32, since large ones may be overtaken. They are matched to posts in order, the n-th message to the
n-th post, whichever comes first.

Messages that arrive before their post are kept. To bound their memory, every message has a *cost*, its number
of bytes plus a constant. The messages that a sender has sent, and does not know to be matched, cost at most
``WINDOW`` in each stream, or are one larger message and others of less than ``REPORT``. The receiver reports
the total cost of what it has matched each time it has grown by ``REPORT``. Messages that may not be sent yet
wait at the sender, in its own memory. Each stream has its own window, so a stream whose receiver does not
post never delays another.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from rpc.errors import ProtocolError

__all__ = ["REPORT", "SEQUENCES", "WINDOW", "Inbound", "Outbound", "cost"]

WINDOW: Final = 16 << 20
"""Maximum cost of unmatched messages in a stream, in bytes."""

REPORT: Final = 1 << 20
"""Cost of matched messages after which the receiver reports, in bytes."""

SEQUENCES: Final = 1 << 32

_CONSTANT_COST: Final = 256

P = TypeVar("P")
M = TypeVar("M")


def cost(size: int) -> int:
    """Return the cost of a message of ``size`` bytes."""
    return size + _CONSTANT_COST


class Inbound(Generic[P, M]):
    """The receiver's side of a stream; ``first`` is the number of the first message. ``posted`` and
    ``arrived`` return the new matches, in order.
    """

    def __init__(self, first: int = 0) -> None:
        self._posts: deque[P] = deque()
        self._arrived: dict[int, tuple[M, int]] = {}
        self._held = 0
        self._next = first
        self._reported = 0
        self._closed = False
        self.end: int | None = None
        """The number after that of the last message, once it is known."""
        self.matched = 0
        """The total cost of all messages that were matched or dropped."""

    def posted(self, post: P) -> list[tuple[P, M]]:
        """Record that a buffer was posted."""
        self._posts.append(post)
        return self._match()

    def arrived(self, sequence: int, message: M, size: int) -> list[tuple[P, M]]:
        """Record that a message has arrived. Raises ``ProtocolError`` if its number was used, or the sender
        has exceeded the window.
        """
        ahead = (sequence - self._next) % SEQUENCES
        if sequence in self._arrived or ahead * _CONSTANT_COST > WINDOW:
            raise ProtocolError(f"message {sequence} of a stream whose next one is {self._next}")
        self._arrived[sequence] = message, cost(size)
        self._held += cost(size)
        if self._held > WINDOW and self._held - max(each for _, each in self._arrived.values()) > WINDOW:
            raise ProtocolError(f"messages of {self._held} bytes come before they may")
        return self._match()

    def _match(self) -> list[tuple[P, M]]:
        pairs: list[tuple[P, M]] = []
        while (self._posts or self._closed) and self._next in self._arrived:
            message, cost = self._arrived.pop(self._next)
            self._next = (self._next + 1) % SEQUENCES
            self._held -= cost
            self.matched += cost
            if self._posts:
                pairs.append((self._posts.popleft(), message))
        return pairs

    def close(self) -> list[P]:
        """Take all posts back; messages that have arrived, or will arrive, are dropped."""
        posts = self.take_posts()
        self._closed = True
        self._match()
        return posts

    def is_complete(self) -> bool:
        """Whether all messages are matched or dropped, and no more will arrive."""
        return self._next == self.end

    def take_hopeless(self) -> list[P]:
        """Take back the posts for which no message will arrive."""
        hopeless: list[P] = []
        while self.end is not None and len(self._posts) > (self.end - self._next) % SEQUENCES:
            hopeless.append(self._posts.pop())
        return hopeless

    def has_posts(self) -> bool:
        """Whether a message is awaited."""
        return bool(self._posts)

    def has(self, post: P) -> bool:
        """Whether a post is not matched."""
        return post in self._posts

    def post_of(self, sequence: int) -> P | None:
        """Return the post that a message that has begun to arrive is for, unless posts are withdrawn."""
        ahead = (sequence - self._next) % SEQUENCES
        return self._posts[ahead] if ahead < len(self._posts) and sequence not in self._arrived else None

    def number_of(self, post: P) -> int | None:
        """Return the number of the message that a post is for, unless posts are withdrawn; None if it is
        matched.
        """
        if post not in self._posts:
            return None
        return (self._next + self._posts.index(post)) % SEQUENCES

    def withdraw(self, post: P) -> bool:
        """Take a post back, unless it is matched; the next message goes to the next post."""
        if post not in self._posts:
            return False
        self._posts.remove(post)
        return True

    def posts_from(self, post: P) -> list[P]:
        """A post that is not matched, and all after it."""
        return list(self._posts)[self._posts.index(post) :]

    def replace(self, post: P, other: P) -> None:
        """Have another post in the place of one that is not matched."""
        self._posts[self._posts.index(post)] = other

    def take_posts(self) -> list[P]:
        """Take all posts back."""
        posts = list(self._posts)
        self._posts.clear()
        return posts

    def is_report_due(self) -> bool:
        """Whether the sender must be notified of what was matched; it counts as reported from now on."""
        if self.matched - self._reported < REPORT:
            return False
        self._reported = self.matched
        return True

    def __bool__(self) -> bool:
        """Whether a message has arrived that is not matched."""
        return bool(self._arrived)


class Outbound(Generic[M]):
    """The sender's side of a stream; ``first`` is the number of the first message."""

    def __init__(self, first: int = 0) -> None:
        self._waiting: deque[tuple[M, int]] = deque()
        self._next = first
        self._sent = 0
        self._matched = 0

    def add(self, message: M, size: int) -> None:
        """Queue a message behind all others."""
        self._waiting.append((message, cost(size)))

    def next(self) -> tuple[int, M] | None:
        """Return the message that must be sent now, and its number; None if there is none, or it may not be
        sent yet.
        """
        if not self._waiting:
            return None
        message, cost = self._waiting[0]
        outstanding = self._sent - self._matched
        if outstanding >= REPORT and outstanding + cost > WINDOW:
            return None
        self._waiting.popleft()
        self._sent += cost
        sequence, self._next = self._next, (self._next + 1) % SEQUENCES
        return sequence, message

    @property
    def end(self) -> int:
        """The number of the message that would be sent next."""
        return self._next

    def reported(self, matched: int) -> None:
        """Record the total cost of what the receiver has matched. Raises ``ProtocolError`` if it is
        impossible.
        """
        if matched > self._sent:
            raise ProtocolError(f"{matched} bytes of a stream are matched, of {self._sent}")
        self._matched = max(self._matched, matched)  # reports may overtake each other

    def withdraw(self, message: M) -> bool:
        """Take a message back, unless it is sent."""
        for entry in self._waiting:
            if entry[0] is message:
                self._waiting.remove(entry)
                return True
        return False

    def take_waiting(self) -> list[M]:
        """Take back all messages that are not sent."""
        messages = [message for message, _ in self._waiting]
        self._waiting.clear()
        return messages

    def __bool__(self) -> bool:
        """Whether a message waits."""
        return bool(self._waiting)
