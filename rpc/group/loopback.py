"""A worker's peer object for itself: calls to oneself serialize too, and skip the socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.serialization import brings_nothing
from rpc.transport import INFINITE
from rpc.wire.frames import Kind, decode_one

if TYPE_CHECKING:
    from rpc.agent.agent import Agent

__all__ = ["LocalPeer"]

_DISPATCHED_AT_ONCE = (Kind.CALL, Kind.REPLY, Kind.FAILURE)


class LocalPeer(Peer):
    """Delivers frames to its own agent, in memory of their own, so that nothing is shared by accident."""

    is_self = True

    __slots__ = ()

    def __init__(self, me: Member, agent: Agent) -> None:
        super().__init__(me, agent, lambda peer: None)

    def send_small(self, frame: bytes, wait: float, *, gather: bool = False) -> None:
        self.send((frame,), len(frame))

    def send(
        self, buffers: Sequence[Any], size: int, *, aliased: bool = False, wait: float = INFINITE
    ) -> None:
        if self.lost is not None:
            raise self.lost_error()
        frame = decode_one(bytearray().join(buffers))
        if frame.kind in _DISPATCHED_AT_ONCE and brings_nothing(frame.header):
            self.agent.frames_received(self, [frame])
        else:  # out of reach of Ctrl-C, which would leave it half taken in
            self.agent.loop.call_soon_threadsafe(self.agent.frames_received, self, [frame])
