"""Reaching a worker at one of its addresses."""

from __future__ import annotations

import asyncio
import os

from rpc.group.peer import Peer
from rpc.transport.base import Connection, Transport

__all__ = ["Unreachable", "dial"]


class Unreachable(Exception):
    """Says where the worker was looked for, and why it was not found there."""


async def dial(peer: Peer, transports: dict[str, Transport], seconds: float) -> Connection:
    """Connect to a worker at the first of its addresses that answers; the result is not yet started.

    Args:
        peer: the worker.
        transports: by scheme.
        seconds: how long one address may take to answer.

    Raises:
        Unreachable: none does.
    """
    failures: list[str] = []
    for address in peer.member.addresses:
        scheme = address.partition(":")[0]
        if scheme not in transports or (scheme == "unix" and not peer.near):
            continue
        try:
            async with asyncio.timeout(seconds):
                return await transports[scheme].connect(address)
        except TimeoutError:
            failures.append(f"{address}: no answer within {seconds:g} s")
        except Exception as error:  # unreachable, or an address that makes no sense
            failures.append(f"{address}: {_why(error)}")
    raise Unreachable("it cannot be reached at " + ("; ".join(failures) or "any address known here"))


def _why(error: Exception) -> str:
    """What hinders a connection, in the system's words."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)
