"""What bulk transfers need of the worker at the other end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rpc.errors import WorkerLostError
from rpc.group.workers import Member
from rpc.serialization.payload import Payload
from rpc.transport.base import Connection

__all__ = ["Peer", "ShareMessage"]


class Peer(Protocol):
    """Another worker, or this one itself. ``rpc.group.peer`` has more."""

    is_self: bool
    member: Member
    name: str
    incarnation: int
    lost: str | None
    """Why it is gone; None while it is not."""
    connection: Connection | None

    def send(self, buffers: Sequence[Any], size: int, *, aliased: bool = ..., wait: float = ...) -> None: ...

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = ...) -> None: ...

    def lost_error(self, consequence: str = ...) -> WorkerLostError: ...


class ShareMessage(Protocol):
    """Sends a message through shared memory; returns whether it could."""

    def __call__(self, peer: Any, kind: int, call_id: int, payload: Payload, wait: float, /) -> bool: ...
