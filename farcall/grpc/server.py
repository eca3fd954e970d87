"""The common part of farcall's gRPC servers: a port, TLS, health (``grpc.health.v1``), reflection."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc import TlsOptions
from rpc.transport.tls import TlsContexts, pem_file

__all__ = ["OPTIONS", "Probes", "bind", "server_credentials"]

OPTIONS: Final = (("grpc.so_reuseport", 0),)
"""Makes binding fail if another process has the port."""


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

    Args:
        server: a server that has not started yet.
        services: full names of its services; their schemas are imported.
    """

    def __init__(self, server: Any, services: Sequence[str]) -> None:
        self._services = services
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def serving(self) -> None:
        """Report that the server serves from now on."""
        for name in ("", *self._services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def ending(self) -> None:
        """Report that the server accepts no more calls, for good."""
        await self._health.enter_graceful_shutdown()
