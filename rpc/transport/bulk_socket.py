"""Connected sockets that a thread blocks on, without the interpreter lock, to either write or read.

Each socket carries data in one direction. So TLS needs no lock that a reading and a writing thread would
share.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from rpc.transport.base import CLOSED_BY_PEER
from rpc.transport.byte_stream import TCP_NOTSENT_LOWAT

__all__ = ["BulkSocket", "TlsBulkSocket", "bulk_socket"]

_PAUSE_SECONDS: Final = 0.02
"""Maximum time in seconds that ``receive`` waits. Afterwards the memory that it receives to can be taken
back.
"""

_PIECES_PER_WRITE: Final = 64


def bulk_socket(sock: socket.socket) -> BulkSocket:
    """Take over a connected socket."""
    return TlsBulkSocket(sock) if isinstance(sock, ssl.SSLSocket) else BulkSocket(sock)


class BulkSocket:
    """A socket without TLS, which it owns. One thread at a time may call ``receive``, and one ``send``.

    Attributes:
        descriptor: descriptor of the socket, for the loop to watch while no thread reads.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.descriptor = sock.fileno()
        self._readable = select.poll()
        self._readable.register(self.descriptor, select.POLLIN)
        with contextlib.suppress(OSError):  # no small message waits behind what the kernel keeps
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, 0)
        self._configure(sock)

    def _configure(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        pause = struct.pack("ll", 0, int(_PAUSE_SECONDS * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)

    def begin_receiving(self) -> None:
        """Prepare for ``receive``, which blocks. A thread calls this once the loop has stopped watching,
        since uvloop makes the descriptors that it watches non-blocking.
        """
        os.set_blocking(self.descriptor, True)

    def wait_readable(self, seconds: float) -> bool:
        """Wait until data or the end of the stream has arrived; false if neither arrives in time."""
        return bool(self._readable.poll(1000 * seconds))

    def receive(self, view: memoryview) -> int:
        """Receive into a buffer what arrives within a moment; returns the number of bytes, which may be 0.
        Raises ``OSError`` at the end of the stream.
        """
        try:
            count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError(CLOSED_BY_PEER)
        return count

    def send(self, pieces: Sequence[Any]) -> None:
        """Write all pieces. Raises ``OSError`` if the stream is broken."""
        left = deque(pieces)
        while left:
            count = self._socket.sendmsg([left[index] for index in range(min(len(left), _PIECES_PER_WRITE))])
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = memoryview(left[0])[count:]

    def shut_down(self) -> None:
        """Interrupt all uses of the socket by other threads. From any thread."""
        with contextlib.suppress(OSError):
            # ``shutdown`` of a TLS socket would go on without encryption.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which no thread may be using."""
        self._socket.close()

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent continues to use its own."""
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)


class TlsBulkSocket(BulkSocket):
    """A socket with TLS, whose handshake is over."""

    _socket: ssl.SSLSocket

    def _configure(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._writable = select.poll()
        self._writable.register(self.descriptor, select.POLLOUT)

    def begin_receiving(self) -> None:
        """Do nothing: the socket stays non-blocking."""

    def wait_readable(self, seconds: float) -> bool:
        return bool(self._socket.pending()) or super().wait_readable(seconds)

    def receive(self, view: memoryview) -> int:
        filled, until = 0, monotonic() + _PAUSE_SECONDS
        while filled < len(view):
            try:
                count = self._socket.recv_into(view[filled:])
            except ssl.SSLWantReadError:
                left = until - monotonic()
                if left <= 0 or not self._readable.poll(1000 * left):
                    break
                continue
            if not count:
                raise ConnectionError(CLOSED_BY_PEER)
            filled += count
        return filled

    def send(self, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                try:
                    count = self._socket.send(view)
                except ssl.SSLWantWriteError:
                    self._writable.poll()
                    continue
                view = view[count:]
