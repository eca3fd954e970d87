"""How frames get from process to process: one file per transport, one registry."""

from __future__ import annotations

import asyncio

from rpc.transport.base import (
    CLOSED_BY_PEER,
    Accepted,
    Connection,
    ConnectionClosed,
    ConnectionOwner,
    Listener,
    Transport,
)
from rpc.transport.tcp import TcpTransport
from rpc.transport.unix import UnixTransport

__all__ = [
    "CLOSED_BY_PEER",
    "Accepted",
    "Connection",
    "ConnectionClosed",
    "ConnectionOwner",
    "Listener",
    "Transport",
    "transports",
]


def transports(loop: asyncio.AbstractEventLoop, send_queue_bytes: int) -> dict[str, Transport]:
    """The transports that this platform has, by scheme, best first."""
    found: list[Transport] = []
    if UnixTransport.available:
        found.append(UnixTransport(loop, send_queue_bytes))
    found.append(TcpTransport(loop, send_queue_bytes))
    return {transport.scheme: transport for transport in found}
