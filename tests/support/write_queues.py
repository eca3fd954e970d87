"""A write queue with a loop and a stream that do what the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rpc.transport.base import CAPTURED_BYTES
from rpc.transport.write_queue import CAPTURE_ALL, WriteQueue
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE, Frame, Kind, encode
from tests.support.streams import SOON

__all__ = ["LARGE", "Loop", "Queue", "Stream"]

LARGE = 2 * CAPTURED_BYTES
"""Size in bytes of a message that is not captured."""


class Loop:
    """A loop that runs when the test says so."""

    def __init__(self) -> None:
        self.soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> None:
        self.soon.append((callback, arguments))

    def run(self) -> None:
        """Do what is to be done now."""
        while self.soon:
            callback, arguments = self.soon.popleft()
            callback(*arguments)


class Stream:
    """Takes as much as it has room for.

    Attributes:
        writes: how much each write took.
        within: called once, by the next write, before it takes anything.
    """

    is_flushed = True
    descriptor: int | None = None

    def __init__(self, room: float = float("inf")) -> None:
        self.writer: Callable[[], object] | None = None
        self.room = room
        self.taken = bytearray(PREAMBLE)
        self.writes: list[int] = []
        self.error: OSError | None = None
        self.within: Callable[[], object] = int

    def on_readable(self, callback: Callable[[], object] | None) -> None:
        pass

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        self.writer = callback

    def shut_down(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def read_into(self, buffers: Sequence[memoryview]) -> int | None:
        return None

    def close(self) -> None:
        pass

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        within, self.within = self.within, int
        within()
        if self.error is not None:
            raise self.error
        data = b"".join(pieces)
        count = int(min(self.room, len(data)))
        self.taken += data[:count]
        self.room -= count
        if count:
            self.writes.append(count)
        return count


class Queue:
    """A write queue with all that is round it."""

    def __init__(self, room: float = float("inf"), limit: int = 1 << 40, captured: int = CAPTURE_ALL) -> None:
        self.loop, self.stream = Loop(), Stream(room)
        self.told: list[str] = []
        tell: Any = SimpleNamespace(
            before_waiting=lambda: self.told.append("waits"),
            failed=lambda: self.told.append("failed"),
            emptied=lambda: self.told.append("emptied"),
        )
        loop: Any = self.loop
        self.queue = WriteQueue(loop, self.stream, "the peer", limit, captured, **vars(tell))

    def send(self, number: int, size: int = 10, *, wait: float = SOON, **options: Any) -> None:
        pieces, length = encode(Kind.CALL, number, {}, [bytes([number]) * size])
        self.queue.send(pieces, length, wait=wait, **options)

    def send_memory(self, number: int, memory: bytearray) -> None:
        pieces, length = encode(Kind.CALL, number, {}, [b"pickle", memory])
        self.queue.send(pieces, length, aliased=True)

    def coalesce(self, number: int) -> None:
        self.queue.send_small(b"".join(encode(Kind.CALL, number, {}, [b"x"])[0]), SOON, coalesce=True)

    def give_room(self, room: float = float("inf")) -> None:
        """The stream takes so much more, and the loop goes on."""
        self.stream.room = room
        self.loop.run()
        while self.stream.room and self.stream.writer is not None and self.queue:
            self.stream.writer()
            self.loop.run()

    def arrived(self) -> list[Frame]:
        """All frames that are complete on the other side."""
        decoder, frames = Decoder(1 << 30), list[Frame]()
        view = memoryview(bytes(self.stream.taken))
        while view:
            buffer = decoder.buffer()
            count = min(len(buffer), len(view))
            buffer[:count], view = view[:count], view[count:]
            frames += decoder.received(count)
        return frames

    def numbers(self) -> list[int]:
        return [frame.call_id for frame in self.arrived()]
