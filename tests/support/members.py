"""Workers of a group, for tests that need no processes."""

from __future__ import annotations

from rpc.group.peer import Peer
from rpc.group.workers import Member, WorkerInfo
from rpc.serialization.serializer import OwnCodec, Serializer


def member(name: str, worker_id: int = 0, incarnation: int | None = None, *addresses: str) -> Member:
    """A worker on this host; its incarnation is 100 and its id unless given."""
    return Member(
        WorkerInfo(name, worker_id),
        100 + worker_id if incarnation is None else incarnation,
        "host",
        addresses,
    )


def ask_nobody(_: Peer) -> None:
    """Connects to nobody."""


def peer(name: str = "callee", worker_id: int = 1) -> Peer:
    """Another worker, that is never reached."""
    return Peer(member(name, worker_id), codec(), ask_nobody)


def codec() -> OwnCodec:
    """The codec of a worker without safe mode."""
    return Serializer().between(False)
