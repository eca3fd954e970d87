"""Unix sockets in Linux's abstract namespace: there is no file to clean up, and the kernel reports the user
of the other process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from typing import Final

from rpc.runtime.limited_log import LimitedLog
from rpc.transport.base import Accepted, TransportContext
from rpc.transport.byte_stream import SocketStream
from rpc.transport.listening import SocketListener
from rpc.transport.stream import StreamConnection

__all__ = ["UnixTransport"]

logger = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_RETRY_SECONDS: Final = 0.02


class UnixTransport:
    """Connections between processes of one user in one network namespace.

    Addresses are ``unix:@NAME``. Both sides refuse processes of other users.
    """

    scheme = "unix"

    def __init__(self, context: TransportContext) -> None:
        self._context = context

    def listen(self, host: str, port: int, accepted: Accepted) -> SocketListener:
        """Listen under a random name; ``host`` and ``port`` are ignored."""
        name = f"farcall-{os.getpid()}-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(b"\0" + name.encode())
        sock.listen(_BACKLOG)

        refusals = LimitedLog(logger)

        def on_socket(connected: socket.socket) -> None:
            process, user = _peer_process(connected)
            if user != os.geteuid():
                refusals.log(logging.WARNING, "turned away a process of user %d on unix:@%s", user, name)
                connected.close()
                return
            connection = self._connection(connected, f"process {process} on this host")
            connection.process = process or None
            accepted(connection)

        return SocketListener(self._context.loop, sock, f"unix:@{name}", on_socket)

    async def connect(self, address: str) -> StreamConnection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            where = b"\0" + address.removeprefix("unix:@").encode()
            while True:
                try:
                    sock.connect(where)
                    break
                except BlockingIOError:  # the backlog is full, and nothing reports when it has room
                    await asyncio.sleep(_RETRY_SECONDS)
            process, user = _peer_process(sock)
            if user != os.geteuid():
                raise PermissionError(f"{address} belongs to user {user}, not to user {os.geteuid()}")
            connection = self._connection(sock, address)
            connection.process = process or None
            return connection
        except BaseException:
            sock.close()
            raise

    def _connection(self, sock: socket.socket, description: str) -> StreamConnection:
        connection = StreamConnection(self._context, SocketStream(self._context.loop, sock), description)
        connection.scheme = self.scheme
        return connection


def _peer_process(sock: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, and its user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user
