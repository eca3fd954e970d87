"""A socket beside the connection of two workers, on which descriptors of segments travel.

Descriptors belong to the first byte of the ``sendmsg`` that brings them, and only ``recvmsg`` keeps them: on
the connection itself, where writes may be cut short and many ways lead to a plain ``recv``, some would be
lost. Here every message is a *record* of its own (``SOCK_SEQPACKET``), sent whole or not at all: a few bytes
and one descriptor.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import socket
import struct
from typing import Final

__all__ = ["accept", "connect", "listen", "receive", "send"]

_MAX_RECORD_BYTES: Final = 4096
_BACKLOG: Final = 8
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
    """The next who has connected, if it is a process of this user; None if it was another's.

    Raises:
        BlockingIOError: nobody has.
        OSError: it cannot be accepted.
    """
    sock, _ = listener.accept()
    sock.setblocking(False)
    if _is_own_users(sock):
        return sock
    sock.close()
    return None


def connect(name: str) -> socket.socket:
    """Connect to who listens under a name.

    Raises:
        OSError: nobody does, too many wait there, or it is a process of another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(b"\0" + name.encode())
        if not _is_own_users(sock):
            raise PermissionError(errno.EACCES, "it is a process of another user")
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, record: bytes, descriptor: int) -> None:
    """Send a record and a descriptor, which stays open here.

    Raises:
        OSError: it was not sent. ``ETOOMANYREFS``: this user has too many descriptors under way.
    """
    rights = array.array("i", [descriptor]).tobytes()
    sock.sendmsg([record], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive(sock: socket.socket) -> tuple[bytes, int | None]:
    """The next record and its descriptor, which is None if it brought none or this process cannot have it.

    All other descriptors that it brings are closed.

    Returns:
        An empty record at the end.

    Raises:
        BlockingIOError: there is none.
        OSError: the socket is broken.
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
