"""Large messages in chunks, so that small ones need not wait for them: without I/O.

A message of more than ``WHOLE_BYTES`` travels as a series of frames. The *opening* has its number, prefix,
table and header; *chunks* have the rest of the message, its buffers and the padding between them, each with
its offset in the message. The chunks of several messages may alternate, and any other frame may come between
them. If two workers have bulk streams (``rpc.bulk.streams``), the chunks of the largest messages travel there
instead, and the threads of the streams fill the same reassembly.

``Outgoing`` decides which chunk is next: each open message in turn. Chunks are long, which costs less, until
a small message has had to wait behind one; then they are short for a while. ``reassembly.py`` decides where
the bytes of a chunk are received: directly into their final place. Each larger buffer gets memory of its own,
so that a tensor can use it without keeping the rest of the message alive; or the message goes to a
``Target``, memory that is provided for it.

If there is no memory for a message, its chunks are dropped as they arrive, and it is delivered as
``Incomplete``: with its header, and without its buffers. So only the call that needs them fails, and the
connection continues.

What a peer may leave open is limited: ``MAX_OPEN`` messages at a time, whose missing bytes do not exceed the
size of the largest message that is accepted. Each bulk stream adds to both, since the streams are not ordered
with each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from rpc.runtime.blocking import Condition, wait_while

__all__ = ["CHUNK_BYTES", "SHORT_CHUNK_BYTES", "WHOLE_BYTES", "ChunkedMessage", "Outgoing"]

WHOLE_BYTES: Final = 256 << 10
"""Maximum size in bytes of a message that is sent as one frame."""

CHUNK_BYTES: Final = 512 << 10
"""Size in bytes of a chunk, if no small message had to wait recently."""

SHORT_CHUNK_BYTES: Final = 128 << 10
"""Size in bytes of a chunk otherwise: the most that a series of small messages waits for. Chunks begin at
multiples of it.
"""

_SHORT_FOR_BYTES: Final = 64 << 20
"""Number of bytes sent in short chunks after a small message: at 10 Gbit/s, in about 50 ms."""

_SENT_AT_ONCE: Final = 8
"""Maximum number of messages to one peer whose chunks alternate."""


class ChunkedMessage:
    """A large message to be sent: its opening frame, its number, and the buffers that follow in chunks,
    contiguous, referenced and not copied; ``size`` is the sum of their lengths in bytes, ``kind`` that of its
    frame.
    """

    def __init__(self, head: bytes, number: int, pieces: Sequence[Any], size: int, kind: int = 0) -> None:
        self.head = head
        self.number = number
        self.kind = kind
        self.size = size
        self.unsent = size
        self.is_open = False
        """Whether its opening is sent."""
        self._pieces = deque(pieces)

    def take(self, count: int) -> list[Any]:
        """Remove the next ``count`` bytes, at most as many as there are; returns them as buffers."""
        taken: list[Any] = []
        self.unsent -= count
        while count:
            piece = self._pieces.popleft()
            if len(piece) > count:
                view = memoryview(piece)
                piece = view[:count]
                self._pieces.appendleft(view[count:])
            taken.append(piece)
            count -= len(piece)
        return taken

    def replace(self, capture: Callable[[Any], Any]) -> None:
        """Replace every piece that is not sent yet by ``capture(piece)``."""
        self._pieces = deque(map(capture, self._pieces))


class Outgoing:
    """The large messages to one peer that are not sent yet. From any thread.

    Args:
        chunk_prefix: makes the prefix of a chunk from the message's number, the chunk's offset and length.
        queue_limit: number of unsent bytes above which callers wait.

    Attributes:
        max_bytes: maximum number of bytes of open messages that the peer accepts; one message may always be
            open.
        unsent: number of bytes that are not yet in any chunk.
    """

    def __init__(
        self, chunk_prefix: Callable[[int, int, int], bytes], max_bytes: int, queue_limit: int
    ) -> None:
        self.max_bytes = max_bytes
        self.unsent = 0
        self._chunk_prefix = chunk_prefix
        self._queue_limit = queue_limit
        self._lock = threading.RLock()  # reentrant: a finalizer that runs while it is held may send
        self._room = Condition(self._lock)
        self._waiting: deque[ChunkedMessage] = deque()
        self._open: deque[ChunkedMessage] = deque()
        self._sent = 0
        self._short_until = 0
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    def wait_for_room(self, deadline: float) -> bool:
        """Wait while the queue is full; false if it still is at ``deadline``."""
        with self._lock:
            return wait_while(self.is_full, self._room, deadline)

    def is_full(self) -> bool:
        """Whether the queue is full."""
        return self.unsent > self._queue_limit and not self._closed

    def add(self, message: ChunkedMessage) -> bool:
        """Queue a message, or the rest of one; it is opened when its turn comes. Returns false if nothing can
        be sent any more.
        """
        with self._lock:
            if self._closed:
                return False
            self.unsent += message.unsent
            if message.is_open:
                self._open.append(message)
            else:
                self._waiting.append(message)
        return True

    def shorten(self) -> None:
        """Make the next chunks short, for a while: a small message waits behind a chunk."""
        self._short_until = self._sent + _SHORT_FOR_BYTES

    def next(self) -> list[Any]:
        """Return what is sent next: a chunk with its prefix, after the opening if it is the first of its
        message; empty if there is nothing.
        """
        with self._lock:
            self._begin_next()
            if not self._open:
                return []
            message = self._open[0]  # not removed yet, as other threads check whether there is one
            before = message.unsent
            pieces = self.chunk(message)
            self.unsent -= before - message.unsent
            self._room.notify_all()
            if message.unsent:
                self._open.rotate(-1)
            else:
                self._open.popleft()
        return pieces

    def _begin_next(self) -> None:
        """Start the next waiting message, if it may be sent now."""
        if not self._waiting or len(self._open) >= _SENT_AT_ONCE:
            return
        open_bytes = sum(message.size for message in self._open)
        if not self._open or open_bytes + self._waiting[0].size <= self.max_bytes:
            self._open.appendleft(self._waiting[0])
            self._waiting.popleft()

    def chunk(self, message: ChunkedMessage) -> list[Any]:
        """Return the next chunk of a message, which need not have been added."""
        count = min(SHORT_CHUNK_BYTES if self._sent < self._short_until else CHUNK_BYTES, message.unsent)
        self._sent += count
        prefix = self._chunk_prefix(message.number, message.size - message.unsent, count)
        if not message.is_open:
            message.is_open = True
            prefix = message.head + prefix
        # Views: ``bytes`` in a queue are messages of their own.
        return [memoryview(prefix), *(memoryview(piece) for piece in message.take(count))]

    def close(self) -> list[ChunkedMessage]:
        """Drop everything: nothing more can be sent. Returns what is dropped, which the caller releases
        without a lock, as that may run code of the user's.
        """
        with self._lock:
            self._closed = True
            dropped = [*self._open, *self._waiting]
            self._waiting.clear()
            self._open.clear()
            self.unsent = 0
            self._room.notify_all()
        return dropped
