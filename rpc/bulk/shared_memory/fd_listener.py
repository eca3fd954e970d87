"""Where a peer that was told to come connects its descriptor channel: once, within a time, with a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Final

from rpc.bulk.shared_memory import fd_channel

__all__ = ["FdListener"]

_TOKEN_BYTES: Final = 16
_OPEN_SECONDS: Final = 20.0
_MAX_WAITING: Final = 8

Entered = Callable[[socket.socket, int | None], None]


class FdListener:
    """Listens until the peer connects that shows the token. On the loop's thread.

    Whoever shows another, or none in time, is turned away, and descriptors that they bring are closed.

    Args:
        loop: the running loop.
        entered: called once, with the socket and the descriptor that came with the token.

    Attributes:
        name: where to connect to.
        token: what to show; it is told to the peer on their connection.

    Raises:
        OSError: this process cannot listen.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, entered: Entered) -> None:
        self._loop = loop
        self._entered = entered
        self._listener, self.name = fd_channel.listen()
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._waiting: set[socket.socket] = set()
        loop.add_reader(self._listener.fileno(), self._acceptable)
        self._timer = loop.call_later(_OPEN_SECONDS, self.close)

    def _acceptable(self) -> None:
        try:
            sock = fd_channel.accept(self._listener)
        except BlockingIOError:
            return
        except OSError:  # no descriptors, most likely: the peer goes on without
            self.close()
            return
        if sock is None:
            return
        if len(self._waiting) >= _MAX_WAITING:
            sock.close()
            return
        self._waiting.add(sock)
        self._loop.add_reader(sock.fileno(), self._readable, sock)

    def _readable(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock.fileno())
        self._waiting.discard(sock)
        try:
            shown, descriptor = fd_channel.receive(sock)
        except OSError:
            sock.close()
            return
        if secrets.compare_digest(shown, self.token):
            self.close()
            self._entered(sock, descriptor)
            return
        sock.close()
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Let nobody in any more."""
        self._timer.cancel()
        for sock in (self._listener, *self._waiting):
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
                sock.close()
        self._waiting.clear()

    def abandon(self) -> None:
        """In a forked child: let go of the descriptors, which the parent goes on using."""
        for sock in (self._listener, *self._waiting):
            descriptor = sock.detach()
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
