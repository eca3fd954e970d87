"""The receiving half of a set of stripes: bytes go from the sockets straight to where they stay.

A stripe whose next chunk belongs to a message that is not open yet is not read until it is: what it brings
waits in the kernel, and then at its sender.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from rpc.bulk.striping.plan import HEADER_BYTES, Arrivals, unpack_header
from rpc.errors import ProtocolError
from rpc.wire.chunking import Room

__all__ = ["StripeReceiver"]

_BYTES_PER_WAKE_UP: Final = 128 << 10
"""How much is received from a stripe before the loop looks at what else there is to do."""

Deliver = Callable[[Any, list[memoryview]], None]


class _Lane:
    """One stripe: where in the stream of chunks it is."""

    __slots__ = ("chunk", "filled", "header", "parts", "socket", "waits")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.filled = 0
        """How much of the header has come."""
        self.chunk = (0, 0, 0)
        """What the header says: the message's number, where in it the chunk begins, its length."""
        self.parts: deque[memoryview] = deque()
        """Where the rest of the chunk goes; empty while the header is read."""
        self.waits = False
        """The chunk's message is not open yet, and the socket is not watched."""


class StripeReceiver:
    """Receives messages over connected, non-blocking sockets, which belong to somebody else.

    On the loop's thread.

    Args:
        loop: the running loop.
        sockets: the stripes.
        arrivals: puts the messages together.
        deliver: takes ``what`` was opened and its segments, when a message is complete.
        failed: told why nothing more comes on a stripe.
        malformed: told what the peer has sent that it must not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: Sequence[socket.socket],
        arrivals: Arrivals,
        deliver: Deliver,
        failed: Callable[[str], None],
        malformed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._lanes = [_Lane(sock) for sock in sockets]
        self._arrivals = arrivals
        self._deliver = deliver
        self._failed = failed
        self._malformed = malformed
        self._idle: Callable[[], None] | None = None
        self._closed = False
        for lane in self._lanes:
            loop.add_reader(lane.socket.fileno(), self._readable, lane)

    def open(self, number: int, what: Any, rooms: Sequence[Room], lead: int) -> None:
        """A message was opened; see ``Arrivals.open``."""
        self._arrivals.open(number, what, rooms, lead)
        self._resume()

    def when_idle(self, idle: Callable[[], None]) -> None:
        """Call ``idle`` once no message is open, which may be now."""
        self._idle = idle
        self._look_whether_idle()

    def close(self) -> None:
        """Receive nothing more, and let go of what has come. The sockets are no longer looked at."""
        self._closed = True
        self._arrivals.clear()
        for lane in self._lanes:
            lane.parts.clear()
            self._loop.remove_reader(lane.socket.fileno())

    def _look_whether_idle(self) -> None:
        if self._idle is not None and not self._arrivals and not self._closed:
            idle, self._idle = self._idle, None
            idle()

    def _readable(self, lane: _Lane) -> None:
        try:
            self._receive(lane)
        except ProtocolError as error:
            self._malformed(str(error))

    def _receive(self, lane: _Lane) -> None:
        budget = _BYTES_PER_WAKE_UP
        while budget > 0 and not self._closed and not lane.waits:
            buffer = lane.parts[0] if lane.parts else lane.header[lane.filled :]
            try:
                count = lane.socket.recv_into(buffer, min(len(buffer), _BYTES_PER_WAKE_UP))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._stop(lane, f"broke: {error.strerror or error}")
                return
            if not count:
                self._stop(lane, "was closed by the other side")
                return
            budget -= count
            self._received(lane, count)
            if count < len(buffer):
                return

    def _stop(self, lane: _Lane, reason: str) -> None:
        self._loop.remove_reader(lane.socket.fileno())
        self._failed(reason)

    def _received(self, lane: _Lane, count: int) -> None:
        if not lane.parts:
            lane.filled += count
            if lane.filled == HEADER_BYTES:
                lane.chunk = unpack_header(lane.header)
                self._begin(lane)
            return
        part = lane.parts.popleft()
        if count < len(part):
            lane.parts.appendleft(part[count:])
        elif not lane.parts:
            self._chunk_complete(lane)

    def _begin(self, lane: _Lane) -> None:
        """A chunk begins, or is to wait."""
        parts = self._arrivals.begin(*lane.chunk)
        if parts is None:
            if not lane.waits:
                lane.waits = True
                self._loop.remove_reader(lane.socket.fileno())
            return
        lane.parts.extend(parts)
        if lane.waits:
            lane.waits = False
            self._loop.add_reader(lane.socket.fileno(), self._readable, lane)

    def _resume(self) -> None:
        """A message was opened: look which chunks need wait no longer."""
        for lane in self._lanes:
            if lane.waits:
                self._begin(lane)

    def _chunk_complete(self, lane: _Lane) -> None:
        lane.filled = 0
        number, _, length = lane.chunk
        complete = self._arrivals.filled(number, length)
        if complete is None:
            return
        self._resume()  # those that there was no room for
        self._deliver(*complete)
        self._look_whether_idle()
