"""TCP: between hosts, and within a host if Unix sockets are not available."""

from __future__ import annotations

import logging
import socket
import ssl
from asyncio.staggered import staggered_race
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rpc.runtime.limited_log import LimitedLog
from rpc.transport.base import CAPTURED_BYTES, Accepted, TransportContext
from rpc.transport.byte_stream import TCP_NOTSENT_LOWAT, DescriptorStream, SocketStream
from rpc.transport.listening import SocketListener
from rpc.transport.stream import StreamConnection
from rpc.transport.tls import Acceptor, TlsStream, shake_hands, why_no_tls

__all__ = ["TcpTransport"]

logger = logging.getLogger(__name__)

_BACKLOG: Final = 1024
SILENT_SECONDS = 60
"""Time in seconds after which a host that neither answers nor accepts anything is taken to be gone."""
_NEXT_ADDRESS_SECONDS: Final = 0.25
"""Time in seconds for one address before the next one is tried as well."""
_UNSENT_BYTES: Final = 256 << 10
"""Number of unsent bytes that the kernel keeps. Large messages in it delay small ones, and it needs little
more than what is in flight on the network.
"""
_RECEIVED_BYTES: Final = 256 << 10
"""Number of received bytes that the kernel keeps within a host, where nothing is in flight. Twice as much
would make large messages little faster, half as much 1.6 times slower (measured).
"""


class TcpTransport:
    """Connections over TCP. Addresses are ``tcp:HOST:PORT``, with IPv6 hosts in brackets.

    If a host is silent for a minute, whatever is sent to it, it is taken to be gone, and calls over a broken
    link fail. Tensors of more than 1 MiB are sent in place; smaller ones are copied. With ``tls`` in the
    context everything is encrypted, and both sides present certificates.
    """

    scheme = "tcp"

    def __init__(self, context: TransportContext) -> None:
        self._loop = context.loop
        self._context = context

    def listen(self, host: str, port: int, accepted: Accepted) -> SocketListener:
        """Listen on ``host``, a name or an address of this machine; with port 0 the kernel chooses one."""
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                # Remaining connections of a worker that listened here recently do not matter, if its socket
                # had the option as well.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            if not port:  # not before: the kernel might choose a port that is about to be used
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        bound, port = sock.getsockname()[:2]
        address = f"tcp:[{bound}]:{port}" if family == socket.AF_INET6 else f"tcp:{bound}:{port}"

        def on_socket(connected: socket.socket) -> None:
            accepted(self._connection(connected, _description(connected)))

        if self._context.tls is None:
            return SocketListener(self._loop, sock, address, on_socket)
        refusals = LimitedLog(logger)

        def on_failure(description: str, error: OSError) -> None:
            # A program that probes the port closes it, and so does a worker that was refused on its first
            # connection.
            level = logging.INFO if isinstance(error, ssl.SSLEOFError) else logging.WARNING
            refusals.log(level, "refused %s: no TLS with it: %s", description, why_no_tls(error))

        acceptor = Acceptor(self._loop, self._context.tls.server, on_socket, on_failure)

        def begin(connected: socket.socket) -> None:
            acceptor.accept(connected, _description(connected))

        return SocketListener(self._loop, sock, address, begin, acceptor.close)

    async def connect(self, address: str) -> StreamConnection:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        targets = await self._resolve(host, int(port))
        # A simple form of RFC 8305, "Happy Eyeballs": each address is tried a little after the previous one,
        # or
        # at once if that has failed.
        sock, _, failures = await staggered_race(
            [partial(self._connected, family, where) for family, where in targets], _NEXT_ADDRESS_SECONDS
        )
        if sock is None:
            raise failures[0] or ConnectionError(f"{address} cannot be reached")
        if self._context.tls is not None:
            sock = await shake_hands(self._loop, self._context.tls.client, sock)
        return self._connection(sock, address)

    async def _resolve(self, host: str, port: int) -> list[tuple[int, Any]]:
        """Return families and addresses of a host, the preferred first."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, where) for family, _, _, _, where in found]

    async def _connected(self, family: int, where: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, where)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connection(self, sock: socket.socket, description: str) -> StreamConnection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        within_host = _host(sock.getsockname) == _host(sock.getpeername)
        if not within_host:
            _give_up_on_silence(sock)
        stream: DescriptorStream
        if isinstance(sock, ssl.SSLSocket):
            stream = TlsStream(self._loop, sock)
        else:
            stream = SocketStream(self._loop, sock)
        connection = StreamConnection(
            self._context,
            stream,
            description,
            CAPTURED_BYTES,
            over_network=True,
            kept_by_kernel=_RECEIVED_BYTES if within_host else 0,
        )
        connection.scheme = self.scheme
        return connection


def _give_up_on_silence(sock: socket.socket) -> None:
    """Make the kernel break the connection when the other host shows no sign of life for a while."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, SILENT_SECONDS // 6)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2 * probe),
        (socket.TCP_KEEPINTVL, probe),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _host(name: Callable[[], Any]) -> str | None:
    try:
        return str(name()[0])
    except OSError:  # it broke at once
        return None


def _description(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that is gone already"
    return f"{host}:{port}"
