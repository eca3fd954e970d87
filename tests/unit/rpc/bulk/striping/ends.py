"""The two halves of a set of stripes over sockets, with nothing but a function call for the connection."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rpc.bulk.striping.plan import HEADER_BYTES, Arrivals, Outgoing, unpack_header
from rpc.bulk.striping.receiving import StripeReceiver
from rpc.bulk.striping.sending import StripeSender
from rpc.runtime.loop import LoopThread
from rpc.wire.decoder import allocate, read_opening
from rpc.wire.frames import encode
from tests.support.streams import SOON

__all__ = ["LIMIT", "Receiving", "Sending", "large", "read_chunk"]

LIMIT = 1 << 30


def large(call_id: int, *lengths: int) -> tuple[list[Any], int]:
    """The buffers of a message, and their size."""
    return encode(5, call_id, {}, [bytes([index + 1]) * length for index, length in enumerate(lengths)])


def read_chunk(sock: socket.socket) -> tuple[int, int, bytes]:
    """The next chunk on a raw stripe: its message's number, where it begins, its content."""
    number, offset, length = unpack_header(_receive(sock, HEADER_BYTES))
    return number, offset, _receive(sock, length)


def _receive(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(length - len(data))
        assert part, "the end"
        data += part
    return bytes(data)


class Noting:
    """Notes what it is told, in order, and lets other threads wait for it."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self._changed = threading.Condition()

    def note(self, *values: Any) -> None:
        with self._changed:
            self.noted.append(values[0] if len(values) == 1 else values)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Any]:
        """The first ``count`` things, as soon as there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.noted) >= count, SOON), self.noted
            return self.noted[:count]


class Sending:
    """A sender and what it says."""

    def __init__(
        self,
        loop: LoopThread,
        sockets: Sequence[socket.socket],
        announce: Callable[[int, bytes], None] | None = None,
        queue_limit: int = LIMIT,
    ) -> None:
        self.openings, self.failures, self.finished = Noting(), Noting(), Noting()
        self._loop = loop
        for sock in sockets:
            sock.setblocking(False)
        self.sender = loop.call(
            lambda: StripeSender(
                loop.loop,
                sockets,
                "the peer",
                Outgoing(LIMIT),
                announce or self.openings.note,
                self.failures.note,
                queue_limit,
            )
        )

    def send(self, message: tuple[list[Any], int], *, aliased: bool = False, wait: float = SOON) -> bool:
        return self.sender.send(*message, aliased=aliased, wait=wait)

    def finish(self) -> None:
        self._loop.call(self.sender.finish, lambda: self.finished.note(True))

    def close(self) -> None:
        self._loop.call(self.sender.close)


class Receiving:
    """A receiver and what it says."""

    def __init__(self, loop: LoopThread, sockets: Sequence[socket.socket]) -> None:
        self.messages, self.failures, self.malformed, self.idle = Noting(), Noting(), Noting(), Noting()
        self.waiting: deque[tuple[int, bytes]] = deque()
        self._loop = loop
        for sock in sockets:
            sock.setblocking(False)
        self.receiver = loop.call(
            lambda: StripeReceiver(
                loop.loop,
                sockets,
                Arrivals(LIMIT, allocate),
                lambda what, segments: self.messages.note(what[1], [bytes(each) for each in segments]),
                self.failures.note,
                self.malformed.note,
            )
        )

    def open(self, number: int, opening: bytes) -> None:
        """As if it had come on the connection."""
        self._loop.loop.call_soon_threadsafe(
            lambda: self.receiver.open(number, *read_opening(memoryview(opening), LIMIT, 0))
        )

    def when_idle(self) -> None:
        self._loop.call(self.receiver.when_idle, lambda: self.idle.note(True))

    def close(self) -> None:
        self._loop.call(self.receiver.close)
