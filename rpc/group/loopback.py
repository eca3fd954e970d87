"""A worker's connection to itself: calls to oneself are serialized too, and skip the socket."""

from __future__ import annotations

import asyncio

from rpc.transport.base import DirectConnection
from rpc.wire.frames import decode_one

__all__ = ["Loopback"]


class Loopback(DirectConnection):
    """Gives each frame to its owner, in memory of its own, so that nothing is shared by accident.

    Frames are taken in on the sender's thread, but for those that need the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("this worker")
        self._loop = loop

    def pass_on(self, frame: bytearray) -> None:
        frames = [decode_one(frame)]
        self.owner.take_inline(frames, keep=False)
        if frames:
            self._loop.call_soon_threadsafe(self.owner.frames_received, self, frames)
