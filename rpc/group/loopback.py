"""A worker's connection to itself: calls to oneself are serialized too, and skip the socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from rpc.transport import INFINITE, ConnectionClosed, ConnectionOwner
from rpc.wire.frames import Kind, decode_one

__all__ = ["Loopback"]

_ON_ANY_THREAD: Final = (Kind.CALL, Kind.REPLY, Kind.FAILURE)


class Loopback:
    """Gives each frame to its owner, in memory of its own, so that nothing is shared by accident.

    Frames with nothing beside their pickle are received on the sender's thread, others on the loop's, where
    Ctrl-C cannot leave them half received.

    Args:
        loop: the agent's.
        brings_nothing: whether a frame with this header has nothing beside its pickle.
    """

    direct: Any = None
    over_network = False
    received_anything = True
    description = "this worker"
    owner: ConnectionOwner

    def __init__(
        self, loop: asyncio.AbstractEventLoop, brings_nothing: Callable[[dict[str, Any]], bool]
    ) -> None:
        self._loop = loop
        self._brings_nothing = brings_nothing
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
        frame = decode_one(bytearray().join(buffers))
        if frame.kind in _ON_ANY_THREAD and self._brings_nothing(frame.header):
            self.owner.frames_received(self, [frame])
        else:
            self._loop.call_soon_threadsafe(self.owner.frames_received, self, [frame])

    def send_small(self, frame: bytes, wait: float, *, gather: bool = False) -> None:
        self.send((frame,), len(frame))

    def flush(self) -> None:
        pass

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self._open:
            self._open = False
            self.owner.connection_lost(self, reason)

    def detach(self) -> socket.socket:
        raise ConnectionClosed("it has no socket")

    def abandon(self) -> None:
        self._open = False
