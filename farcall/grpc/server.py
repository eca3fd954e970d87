"""The common part of farcall's gRPC servers: a port, TLS, health (``grpc.health.v1``), reflection."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from rpc.options import TlsOptions
from rpc.transport.tls import TlsContexts, pem_file

__all__ = ["OPTIONS", "Probes", "bind", "server_credentials"]

OPTIONS: Final = (("grpc.so_reuseport", 0),)
"""Makes binding fail if another process has the port."""

_REQUEST_BYTES: Final = 4096
"""Maximum size of a request for the health of a service."""

_WATCHES_OF_ONE: Final = 16
_WATCHES: Final = 256
"""Maximum numbers of health watches on one connection, of which the next is refused, and in all, of which the
oldest ends. Those of strangers are counted apart, so that they end no others.
"""


def server_credentials(tls: TlsOptions, client_certificates: bool = True) -> Any:
    """Return a server's credentials: its certificate, and whether callers need one of the same authority.

    Raises:
        InvalidOptionError: the files are invalid; gRPC would not say which, or why.
    """
    TlsContexts.of(tls)
    pair = (pem_file("key", tls.key), pem_file("cert", tls.cert))
    authority = pem_file("ca", tls.ca) if client_certificates else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=client_certificates)


def bind(server: Any, host: str, port: int, credentials: Any) -> int:
    """Make a server listen; returns the port, which the kernel picks if ``port`` is 0.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    _try(host, port)  # gRPC does not return the reason, and writes to stderr
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound: int = (
            server.add_insecure_port(place)
            if credentials is None
            else server.add_secure_port(place, credentials)
        )
    except RuntimeError as error:
        raise OSError(errno.EADDRNOTAVAIL, f"cannot listen at {place}: {error}") from error
    return bound


def _try(host: str, port: int) -> None:
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {host}:{port}: {error.strerror or error}") from error


class Probes:
    """Answers health and reflection requests.

    A stranger may ask for the health, so that costs little: what is kept of a request is nothing, and only so
    many watches last, on one connection and in all. All services of the server have the same health.

    Args:
        services: full names of its services; their schemas are imported.
        reads: whether the request of a call, by its context, is read. gRPC limits the size of a message only
            for all methods together. A request that is not read asks for the server as a whole.
    """

    def __init__(self, services: Sequence[str], reads: Callable[[Any], bool]) -> None:
        self._services = services
        self._reads = reads
        self._status = health_pb2.HealthCheckResponse.SERVING
        self._watches: tuple[dict[asyncio.Future[Any], str], ...] = ({}, {})
        """Connections of the watches of strangers, and of callers whose requests are read."""
        answers = {"Check": self._check, "Watch": self._watch}
        self._methods = {name: grpc.stream_stream_rpc_method_handler(each) for name, each in answers.items()}

    @property
    def health(self) -> dict[str, Any]:
        """Handlers of the methods for the health, by their full names."""
        return {f"/{health.SERVICE_NAME}/{name}": each for name, each in self._methods.items()}

    def add_to(self, server: Any) -> None:
        """Answer the requests to a server that has not started yet."""
        handlers = grpc.method_handlers_generic_handler(health.SERVICE_NAME, self._methods)
        server.add_generic_rpc_handlers((handlers,))
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    def ending(self) -> None:
        """Report that the server accepts no more calls, for good."""
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        for each in (*self._watches[False], *self._watches[True]):
            if not each.done():
                each.set_result(None)

    async def _check(self, _: Any, context: Any) -> None:
        if not await self._is_known(context):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        await context.write(self._answer(self._status))

    async def _watch(self, _: Any, context: Any) -> None:
        is_known, connection = await self._is_known(context), context.peer()
        watches = self._watches[self._reads(context)]
        if list(watches.values()).count(connection) >= _WATCHES_OF_ONE:
            text = f"{_WATCHES_OF_ONE} watches are under way on this connection, all that it may have"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        if len(watches) >= _WATCHES:
            oldest = next(iter(watches))
            del watches[oldest]
            if not oldest.done():
                oldest.set_exception(_TooMany())
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watches[changed] = connection
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        try:
            before = self._status
            await context.write(self._answer(before if is_known else unknown))
            if before == self._status:
                await changed
            if is_known:
                await context.write(self._answer(self._status))
            await asyncio.get_running_loop().create_future()  # until the caller, or the server, ends the call
        except _TooMany:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there are newer watches")
        finally:
            watches.pop(changed, None)

    async def _is_known(self, context: Any) -> bool:
        """Whether a call asks for a service that is here, or for the server as a whole."""
        if not self._reads(context):
            return True
        request = await context.read()
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
        if len(request) > _REQUEST_BYTES:
            text = f"the request has {len(request)} bytes; it may have {_REQUEST_BYTES}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        try:
            asked = health_pb2.HealthCheckRequest.FromString(request).service
        except (DecodeError, UnicodeDecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no HealthCheckRequest")
        return asked in ("", *self._services)

    def _answer(self, status: Any) -> bytes:
        return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())


class _TooMany(Exception):
    """A watch ends, since there are too many newer ones."""
