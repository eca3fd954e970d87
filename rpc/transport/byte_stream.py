"""Bytes to and from another process, whatever is below: what stream transports are made of.

A ``ByteStream`` is non-blocking, so any thread may use it, and the loop watches its descriptor.
``SocketStream`` is the one over a socket; one that encrypts would wrap another.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Protocol

from rpc.transport import syscalls

__all__ = ["ByteStream", "SocketStream"]

_JOINED_BYTES: Final = 16 << 10
"""So little is quicker copied into one piece than written by a call that lets go of the interpreter."""


class ByteStream(Protocol):
    """An ordered, reliable stream of bytes in both directions. No method blocks."""

    plain: bool
    """Whether what comes on the descriptor is what ``read_into`` returns, so that a thread may read it
    itself.
    """

    def fileno(self) -> int:
        """The descriptor that is readable, or writable, when there may be something to do."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write as much as is taken now; returns how many bytes that are, 0 for none.

        Raises:
            OSError: the stream is broken.
        """

    def read_into(self, buffer: memoryview) -> int | None:
        """Read what is there, at most as much as the buffer holds.

        Returns:
            How many bytes; 0 at the end of the stream, None if there is nothing now.

        Raises:
            OSError: the stream is broken.
        """

    def close(self) -> None:
        """Close the descriptor. Nobody may be in another method."""


class SocketStream:
    """A connected stream socket, which it owns.

    Small writes and reads keep the interpreter (see ``syscalls``); large ones let others run.
    """

    plain = True

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._descriptor = sock.fileno()

    def fileno(self) -> int:
        return self._descriptor

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        if syscalls.AVAILABLE and sum(map(len, pieces)) <= _JOINED_BYTES:
            data = pieces[0] if len(pieces) == 1 and type(pieces[0]) is bytes else b"".join(pieces)
            count = syscalls.send_bytes(self._descriptor, data)
            if count > 0 or not data:
                return max(count, 0)
        try:
            return self.socket.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0

    def read_into(self, buffer: memoryview) -> int | None:
        try:
            return self.socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def close(self) -> None:
        self.socket.close()

    def shut_down(self) -> None:
        """End both directions; the descriptor stays."""
        self.socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> int:
        """Give up the descriptor without closing it; returns it, -1 if it is closed."""
        return self.socket.detach()
