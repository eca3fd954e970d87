"""Accepting connections on a listening socket, shared by the transports that have one."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Final

__all__ = ["SocketListener"]

logger = logging.getLogger(__name__)

_ACCEPTS_PER_WAKE_UP: Final = 64
_ACCEPTS_PER_SECOND: Final = 500
_ACCEPTS_AT_ONCE: Final = 1024
"""Maximum number of connections accepted at once: a whole large group may connect together, but a flood must
not slow down members.
"""
_RETRY_SECONDS: Final = 0.1
_SILENT_SECONDS: Final = 10.0
"""Interval in seconds in which the inability to accept connections is logged once."""


class SocketListener:
    """Accepts connections on a bound and listening socket, and passes them on, until it is ``closed``. On the
    loop's thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        address: str,
        accepted: Callable[[socket.socket], None],
        closed: Callable[[], object] = int,
    ) -> None:
        self.address = address
        self._loop = loop
        self._socket = sock
        self._accepted = accepted
        self._closed = closed
        self._open = True
        self._silent_until = 0.0
        self._allowed = float(_ACCEPTS_AT_ONCE)
        self._counted_at = loop.time()
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        now = self._loop.time()
        self._allowed += (now - self._counted_at) * _ACCEPTS_PER_SECOND
        self._allowed = min(self._allowed, _ACCEPTS_AT_ONCE)
        self._counted_at = now
        if self._allowed < 1:
            self._pause()
            return
        for _ in range(min(_ACCEPTS_PER_WAKE_UP, int(self._allowed))):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Most likely there are no descriptors left. The event would be raised again at once: pause
                # for a while.
                if self._loop.time() > self._silent_until:
                    self._silent_until = self._loop.time() + _SILENT_SECONDS
                    logger.warning("cannot accept connections on %s just now: %s", self.address, error)
                self._pause()
                return
            self._allowed -= 1
            try:
                self._accepted(accepted)
            except (OSError, MemoryError) as error:  # it broke at once, or there is no memory for it
                logger.info("a connection on %s is closed: %s", self.address, error)
                accepted.close()

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.call_later(_RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._socket.fileno(), self._acceptable)

    def close(self) -> None:
        """Stop listening."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._closed()

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent continues to use its own."""
        self._open = False
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)
