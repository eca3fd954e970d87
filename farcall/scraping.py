"""Serves metrics to Prometheus: HTTP/1.1 on the running loop, one request per connection.

A client can occupy neither a thread nor much memory: a request has a few KB, a connection lasts a few
seconds, and if there are many connections, the oldest are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rpc.transport.listening import SocketListener

__all__ = ["Admits", "published"]

Admits = Callable[[str], bool]
"""Whether the value of the header ``Authorization`` permits to read the metrics; '' without that header."""

_CONNECTIONS: Final = 16
"""Maximum number of open connections, those in the TLS handshake included."""
_BACKLOG: Final = 128
_SECONDS: Final = 10.0
"""Maximum time of a connection, from its beginning, the TLS handshake included, to the end of the answer."""
_HEAD_BYTES: Final = 8192
"""Maximum size of a request."""
_PATHS: Final = ("/", "/metrics")


@contextlib.asynccontextmanager
async def published(
    registry: CollectorRegistry, host: str, port: int, *, admits: Admits, tls: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """Serve metrics while the context lasts.

    Args:
        registry: the metrics.
        host: the address to listen on.
        port: the port to listen on; 0 for any.
        admits: decides which clients may read them.
        tls: serve them over HTTPS.

    Yields:
        The port.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    loop = asyncio.get_running_loop()
    connections: dict[asyncio.Task[None], None] = {}

    def accept(sock: socket.socket) -> None:
        while len(connections) >= _CONNECTIONS:
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.cancel()
        task = loop.create_task(_answer(sock, registry, admits, tls))
        connections[task] = None
        task.add_done_callback(lambda each: end(each, sock))

    def end(task: asyncio.Task[None], sock: socket.socket) -> None:
        connections.pop(task, None)
        sock.close()  # here, as a task that is cancelled before its first step runs nothing

    address = f"{host}:{port}"
    try:
        listening = _listening(host, port)
    except OSError as error:
        raise OSError(error.errno, f"metrics cannot be served at {address}: {error.strerror}") from error
    bound: int = listening.getsockname()[1]
    listener = SocketListener(loop, listening, address, accept)
    try:
        yield bound
    finally:
        listener.close()
        for each in list(connections):
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def _listening(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = found[0]
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)


async def _answer(
    sock: socket.socket, registry: CollectorRegistry, admits: Admits, tls: ssl.SSLContext | None
) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_HEAD_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport = None
    try:
        async with asyncio.timeout(_SECONDS):
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                status, body = _response(await reader.readuntil(b"\r\n\r\n"), registry, admits)
            except asyncio.LimitOverrunError:
                status, body = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b""
            writer.write(_headers(status, len(body)) + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (TimeoutError, asyncio.IncompleteReadError, OSError):
        pass  # the client is slow, or gone
    finally:
        if transport is not None:
            transport.abort()


def _response(request: bytes, registry: CollectorRegistry, admits: Admits) -> tuple[HTTPStatus, bytes]:
    line, *headers = request.decode("latin-1").split("\r\n")
    method, _, rest = line.partition(" ")
    target, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        return HTTPStatus.BAD_REQUEST, b""
    named = {
        name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in headers)
    }
    if not admits(named.get("authorization", "")):
        return HTTPStatus.UNAUTHORIZED, b""
    if target.partition("?")[0] not in _PATHS:
        return HTTPStatus.NOT_FOUND, b""
    if method != "GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, b""
    return HTTPStatus.OK, generate_latest(registry)


def _headers(status: HTTPStatus, size: int) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {CONTENT_TYPE_LATEST}",
        f"Content-Length: {size}",
        "Connection: close",
        *(["WWW-Authenticate: Bearer"] if status is HTTPStatus.UNAUTHORIZED else []),
        *(["Allow: GET"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode()
