"""A socket beside the connection of two workers, on which descriptors of segments are sent.

A descriptor belongs to the first byte of the ``sendmsg`` that sends it, and only ``recvmsg`` keeps it. On the
connection itself, where writes may be partial and many reads are plain ``recv``, some would be lost. Here
every message is a *record* of its own (``SOCK_SEQPACKET``), sent whole or not at all: a few bytes and one
descriptor.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Final

__all__ = ["FdListener", "accept", "connect", "listen", "receive", "send"]

_MAX_RECORD_BYTES: Final = 4096
_BACKLOG: Final = 8
_TOKEN_BYTES: Final = 16
_OPEN_SECONDS: Final = 20.0
_MAX_WAITING: Final = 8
_INT: Final = struct.calcsize("i")


def listen() -> tuple[socket.socket, str]:
    """Listen under a new name in Linux's abstract namespace; returns the socket and the name."""
    name = f"farcall-segments-{os.getpid()}-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(b"\0" + name.encode())
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, name


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept the next connection; None if it is of a process of another user. Raises ``OSError`` if there is
    none, or it cannot be accepted.
    """
    sock, _ = listener.accept()
    sock.setblocking(False)
    if _is_own_users(sock):
        return sock
    sock.close()
    return None


def connect(name: str, timeout: float = 0.0) -> socket.socket:
    """Connect to a listener by its name; the socket has this timeout in seconds, and does not block by
    default. Raises ``OSError`` if there is no listener, its backlog is full (until the timeout), or it
    belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect(b"\0" + name.encode())
        if not _is_own_users(sock):
            raise PermissionError(errno.EACCES, "it is a process of another user")
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, record: bytes, descriptor: int) -> None:
    """Send a record and a descriptor, which stays open here. Raises ``OSError`` if it was not sent; with
    ``ETOOMANYREFS``, this user has too many descriptors in flight.
    """
    rights = array.array("i", [descriptor]).tobytes()
    sock.sendmsg([record], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive(sock: socket.socket) -> tuple[bytes, int | None]:
    """Receive the next record, empty at the end of the stream, and its descriptor: None if it has none, or
    this process cannot have more.

    All other descriptors in the record are closed. Raises ``BlockingIOError`` if there is no record,
    ``OSError`` if the socket is broken.
    """
    room = socket.CMSG_SPACE(_INT)
    record, ancillary, flags, _ = sock.recvmsg(_MAX_RECORD_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % _INT])
    if len(descriptors) == 1 and not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        return record, descriptors[0]
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return record, None


def _is_own_users(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user == os.geteuid()


class FdListener:
    """Listens under ``name`` until the peer connects that has the token. On the loop's thread.

    Processes that have another token, or send none in time, are disconnected, and descriptors that they send
    are closed. ``entered`` is called once, with the socket and the descriptor that came with the token. The
    constructor raises ``OSError`` if this process cannot listen.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, entered: Callable[[socket.socket, int | None], None]
    ) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._loop = loop
        self._entered = entered
        self._waiting: set[socket.socket] = set()
        self._listener, self.name = listen()
        loop.add_reader(self._listener.fileno(), self._acceptable)
        self._timer = loop.call_later(_OPEN_SECONDS, self.close)

    def _acceptable(self) -> None:
        try:
            sock = accept(self._listener)
        except BlockingIOError:
            return
        except OSError:  # most likely no descriptors are left: the peer continues without shared memory
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
            shown, descriptor = receive(sock)
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
        """Accept no more connections."""
        self._timer.cancel()
        for sock in (self._listener, *self._waiting):
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
                sock.close()
        self._waiting.clear()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the parent continues to use its own."""
        for sock in (self._listener, *self._waiting):
            descriptor = sock.detach()
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
