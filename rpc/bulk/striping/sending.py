"""The sending half of a set of stripes: chunks go over whichever stripe takes them.

Threads only add messages to what is waiting; all else happens on the loop's thread. So no exception can come
between the parts of a step: a message that was added is sent, whole, whatever becomes of the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from time import monotonic
from typing import Any, Final

from rpc.bulk.striping.plan import Outgoing
from rpc.transport import CAPTURED_BYTES, ConnectionClosed, QueueFull

__all__ = ["StripeSender"]

_BYTES_PER_WAKE_UP: Final = 128 << 10
"""How much is written to a stripe before the loop looks at what else there is to do."""
_PIECES_PER_WRITE: Final = 64
_SLICE_SECONDS: Final = 0.5
"""A signal right before a wait does not end it: no wait is longer than this."""


class _Lane:
    """One stripe: what it has still to take of its chunk."""

    __slots__ = ("left", "socket", "watched")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.left: deque[Any] = deque()
        self.watched = False


class StripeSender:
    """Sends messages over connected, non-blocking sockets, which belong to somebody else.

    ``send`` may be called from any thread, everything else on the loop's thread.

    Args:
        loop: the running loop.
        sockets: the stripes.
        description: names the other end in errors.
        outgoing: decides what goes next.
        announce: opens a message, of its number and the opening's content, on the connection itself.
        failed: told why a stripe takes nothing more.
        queue_limit: callers wait while more bytes than this are to be sent.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: Sequence[socket.socket],
        description: str,
        outgoing: Outgoing,
        announce: Callable[[int, bytes], None],
        failed: Callable[[str], None],
        queue_limit: int,
    ) -> None:
        self._loop = loop
        self._lanes = [_Lane(sock) for sock in sockets]
        self._description = description
        self._outgoing = outgoing
        self._announce = announce
        self._failed = failed
        self._queue_limit = queue_limit
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._room = threading.Condition(self._lock)
        self._unsent_bytes = 0
        self._finishing: Callable[[], None] | None = None
        self._taking = True
        self._closed = False

    # ---- any thread

    def send(self, buffers: Sequence[Any], size: int, *, aliased: bool, wait: float) -> bool:
        """Send a message; arguments are as for ``Connection.send``.

        Returns:
            Whether it was sent; if not, the stripes are taken in already.

        Raises:
            ConnectionClosed: they are closed.
            QueueFull: there is no room for it, and the sender's patience is over.
        """
        if wait and self._is_full():
            self._wait_for_room(wait)
        pieces = [piece if type(piece) is bytes else memoryview(piece).cast("B") for piece in buffers]
        if aliased:
            pieces = [_captured(piece) for piece in pieces]
        try:
            with self._lock:
                if self._closed:
                    raise ConnectionClosed(f"the connection to {self._description} is closed")
                if not self._taking:
                    return False
                # In this order: a signal may come between, and what is not counted is no harm.
                self._outgoing.add(pieces, size)
                self._unsent_bytes += size - len(pieces[0])
            self._tell_loop()
        except BaseException:  # Ctrl-C: the message may be among what is to be sent
            self._tell_loop()
            raise
        return True

    def _tell_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(self._go_on)

    def _is_full(self) -> bool:
        return self._unsent_bytes > self._queue_limit and not self._closed

    def _wait_for_room(self, patience: float) -> None:
        deadline = monotonic() + patience
        with self._lock:
            while self._is_full():
                left = deadline - monotonic()
                if left <= 0:
                    raise QueueFull(f"{self._description} does not take what is queued for it")
                self._room.wait(min(left, _SLICE_SECONDS))

    # ---- the loop's thread

    def finish(self, finished: Callable[[], None]) -> None:
        """Take no more messages; ``finished`` is called once what there is has been sent, or is lost."""
        with self._lock:
            self._taking = False
        self._finishing = finished
        self._look_whether_finished()

    def close(self) -> None:
        """Send nothing more. The sockets are no longer looked at."""
        with self._lock:
            self._closed = True
            self._outgoing.clear()
            self._room.notify_all()
        for lane in self._lanes:
            lane.left.clear()
            self._watch(lane, False)
        self._look_whether_finished()

    def _look_whether_finished(self) -> None:
        finished = self._finishing
        if finished is not None and not self._outgoing and not any(lane.left for lane in self._lanes):
            self._finishing = None
            finished()

    def _go_on(self) -> None:
        for lane in self._lanes:
            if not lane.watched and not self._closed and (lane.left or self._outgoing):
                self._write(lane)

    def _write(self, lane: _Lane) -> None:
        """Write to a stripe what it takes, but not for long."""
        budget = _BYTES_PER_WAKE_UP
        while budget > 0 and not self._closed:
            if not lane.left and not self._next_chunk(lane):
                self._watch(lane, False)
                self._look_whether_finished()
                return
            try:
                count = lane.socket.sendmsg(list(islice(lane.left, _PIECES_PER_WRITE)))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._watch(lane, False)
                self._failed(f"broke: {error.strerror or error}")
                return
            _discard(lane.left, count)
            budget -= count
        if not self._closed:
            self._watch(lane, True)

    def _next_chunk(self, lane: _Lane) -> bool:
        chunk = self._outgoing.next()
        if chunk is None:
            return False
        if chunk.opening is not None:
            self._announce(*chunk.opening)
        lane.left.extend(chunk.pieces)
        with self._lock:
            self._unsent_bytes -= sum(map(len, chunk.pieces[1:]))  # the first is none of a message
            self._room.notify_all()
        return True

    def _watch(self, lane: _Lane, watched: bool) -> None:
        if watched and not lane.watched:
            self._loop.add_writer(lane.socket.fileno(), self._write, lane)
        elif lane.watched and not watched:
            self._loop.remove_writer(lane.socket.fileno())
        lane.watched = watched


def _captured(piece: Any) -> Any:
    """The same bytes in memory that nobody else changes, unless that is too long: see ``CAPTURED_BYTES``."""
    return piece if type(piece) is bytes or len(piece) > CAPTURED_BYTES else bytes(piece)


def _discard(pieces: deque[Any], count: int) -> None:
    """Remove the first ``count`` bytes."""
    while count:
        length = len(pieces[0])
        if length > count:
            pieces[0] = memoryview(pieces[0])[count:]
            return
        count -= length
        pieces.popleft()
