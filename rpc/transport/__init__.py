"""How frames get from process to process: one file per transport, one registry."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from rpc.transport.base import (
    CAPTURED_BYTES,
    CLOSED_BY_PEER,
    INFINITE,
    SMALL_BYTES,
    Accepted,
    Connection,
    ConnectionClosed,
    ConnectionOwner,
    Listener,
    QueueFull,
    Transport,
)
from rpc.transport.tcp import TcpTransport
from rpc.transport.unix import UnixTransport

__all__ = [
    "CAPTURED_BYTES",
    "CLOSED_BY_PEER",
    "INFINITE",
    "SMALL_BYTES",
    "Accepted",
    "Connection",
    "ConnectionClosed",
    "ConnectionOwner",
    "Listener",
    "QueueFull",
    "Transport",
    "transports",
]


def transports(
    loop: asyncio.AbstractEventLoop, send_queue_bytes: int, names: Collection[str] | None = None
) -> dict[str, Transport]:
    """The transports that this platform has, of those that ``names`` allows, by scheme, best first."""
    found: list[Transport] = []
    if UnixTransport.available:
        found.append(UnixTransport(loop, send_queue_bytes))
    found.append(TcpTransport(loop, send_queue_bytes))
    return {each.scheme: each for each in found if names is None or each.scheme in names}
