"""Serves the metrics of a server to Prometheus: HTTP/1.1 on the server's loop, one request per connection.

Whoever reaches the port can occupy neither a thread nor much memory: a request has a few KB, a connection
lasts a few seconds, and of many connections the oldest are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

__all__ = ["Admits", "published"]

Admits = Callable[[str], bool]
"""Whether the value of the header ``Authorization`` permits to read the metrics; '' without that header."""

_CONNECTIONS: Final = 16
"""Maximum number of open connections."""
_SECONDS: Final = 10.0
"""Maximum time of a connection, from its beginning to the end of the answer."""
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
        host: the address to listen at.
        port: 0 for one that is free.
        admits: who may read them.
        tls: serve them over HTTPS.

    Yields:
        The port.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    connections: dict[asyncio.Task[None], None] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(connections) >= _CONNECTIONS:
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(_answer(reader, writer, registry, admits))
        connections[task] = None
        task.add_done_callback(lambda each: connections.pop(each, None))

    handshake = {} if tls is None else {"ssl_handshake_timeout": _SECONDS}
    try:
        server = await asyncio.start_server(accept, host, port, limit=_HEAD_BYTES, ssl=tls, **handshake)
    except OSError as error:
        raise OSError(
            error.errno, f"metrics cannot be served at {host}:{port}: {os.strerror(error.errno or 0)}"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in list(connections):
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, registry: CollectorRegistry, admits: Admits
) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
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
        writer.transport.abort()


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
