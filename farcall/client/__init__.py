"""Calls to a served function or module from Python, with NumPy's arrays; PyTorch is not needed."""

from __future__ import annotations

from farcall.extras import missing

try:
    from farcall.client.arrays import BCOMPLEX32, COMPLEX32, FLOAT4_PAIR
    from farcall.client.connection import AsyncClient, Client, Tls, connect, connect_async
    from farcall.client.errors import CallError, ServedError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing("farcall.client", "client", error), name=error.name) from error

__all__ = [
    "BCOMPLEX32",
    "COMPLEX32",
    "FLOAT4_PAIR",
    "AsyncClient",
    "CallError",
    "Client",
    "ServedError",
    "Tls",
    "connect",
    "connect_async",
]
