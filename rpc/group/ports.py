"""What the group's parts need of the agent that they serve."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.runtime.tasks import Task
from rpc.wire.frames import Frame

__all__ = ["ConnectionEvents"]


class ConnectionEvents(Protocol):
    """What ``Connections`` asks and tells, on the loop's thread."""

    @property
    def followed(self) -> Collection[int]:
        """See ``ConnectionOwner``."""

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None: ...

    def take_inline(self, peer: Peer, frames: list[Frame], *, keep: bool) -> Task | None:
        """On any thread; see ``ConnectionOwner``."""

    def peer_for(self, member: Member) -> Peer:
        """The peer object of a member, made if need be."""

    def peer_gone(self, peer: Peer, reason: str) -> None: ...
