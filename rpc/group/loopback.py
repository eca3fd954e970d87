"""A worker's connection to itself: calls to oneself are serialized too, and skip the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rpc.transport.base import INFINITE, ConnectionClosed, ConnectionOwner
from rpc.wire.frames import decode_one

__all__ = ["Loopback"]


class Loopback:
    """Gives each frame to its owner, in memory of its own, so that nothing is shared by accident.

    Frames are taken in on the sender's thread, but for those that need the loop's.

    Args:
        loop: the agent's.
    """

    reader: Any = None
    over_network = False
    received_anything = True
    description = "this worker"
    owner: ConnectionOwner

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open = True

    def start(self, owner: ConnectionOwner) -> None:
        self.owner = owner

    def set_frame_limits(self, received: int, sent: int) -> None:
        pass

    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        if not self._open:
            raise ConnectionClosed("this worker is closed")
        frames = [decode_one(bytearray().join(buffers))]
        self.owner.take_inline(self, frames, keep=False)
        if frames:
            self._loop.call_soon_threadsafe(self.owner.frames_received, self, frames)

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False) -> None:
        self.send((frame,), len(frame))

    def flush(self) -> None:
        pass

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self._open:
            self._open = False
            self.owner.connection_lost(self, reason)

    def abandon(self) -> None:
        self._open = False
