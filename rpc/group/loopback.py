"""A worker's connection to itself: its calls are serialized as well, but do not use a socket."""

from __future__ import annotations

import asyncio

from rpc.transport.base import DirectConnection
from rpc.wire.frames import decode_one

__all__ = ["Loopback"]


class Loopback(DirectConnection):
    """Passes each frame to its owner, in memory of its own, so that no memory is shared by accident.

    Frames are handled on the sender's thread, except those that need the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("this worker")
        self._loop = loop

    def pass_on(self, frame: bytearray) -> None:
        frames = [decode_one(frame)]
        self.owner.take_inline(frames, keep=False)
        if frames:
            self._loop.call_soon_threadsafe(self.owner.frames_received, self, frames)
