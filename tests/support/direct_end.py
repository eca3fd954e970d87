"""What tests of direct reading need: a connection whose other end the test holds, calls and requests."""

from __future__ import annotations

import socket
import time
from collections.abc import Sized
from typing import Any

from rpc.runtime.loop import LoopThread
from rpc.transport.inline_read.promptness import Promptness
from rpc.transport.inline_read.reading import DirectReading
from rpc.transport.stream import StreamConnection
from rpc.wire.frames import PREAMBLE, Frame, Kind, encode
from tests.support.streams import SOON, Recorder, open_connection, until

__all__ = ["REQUESTS", "UNATTENDED", "Call", "End", "Requests", "frame"]

UNATTENDED = 50
"""An answer that nobody waits for: any thread may take it in."""


class Call:
    """A call whose reply is waited for."""

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.outcome: Any = None
        self.turn: Any = None
        self.looked: list[Sized] = []
        self.others: list[int] = []

    def take_in(self, frames: list[Frame]) -> bool:
        ids = [each.call_id for each in frames]
        if any("beside" in each.header or each.kind == Kind.CALL for each in frames):
            return False
        if not {self.call_id, UNATTENDED}.issuperset(ids):
            return False
        self.others += [each for each in ids if each == UNATTENDED]
        if self.call_id in ids:
            self.outcome = frames[ids.index(self.call_id)]
        return True

    def takes(self, header: dict[str, Any]) -> bool:
        return "beside" not in header

    def look(self, frame: Frame, taken: Sized) -> Frame | None:
        self.looked.append(taken)
        return (
            None if frame.buffers == [b"malformed"] else Frame(Kind.REPLY, frame.call_id, {}, [b"elsewhere"])
        )

    def has_taken(self) -> int:
        """How many of the replies that it has looked at were taken."""
        return sum(map(bool, self.looked))


def frame(
    kind: int, call_id: int, payload: bytes = b"payload", header: dict[str, Any] | None = None
) -> bytes:
    return b"".join(encode(kind, call_id, header or {}, [payload])[0])


class Requests:
    """Takes requests as they are."""

    def takes(self, frame: Frame) -> bool:
        return frame.kind == Kind.CALL and "beside" not in frame.header

    def __init__(self) -> None:
        self.passed_on: list[int] = []

    def take(self, frames: list[Frame], *, busy: bool = False) -> Frame | None:
        if frames[0].header.get("malformed"):
            raise ValueError(frames[0].header)
        mine = None if busy else next((each for each in frames if each.call_id != UNATTENDED), None)
        self.passed_on += [each.call_id for each in frames if each is not mine]
        return mine

    def is_followed(self, frames: list[Frame]) -> bool:
        return "followed" in frames[-1].header


REQUESTS = Requests()


class End:
    """A connection whose other end is a bare socket in the hands of the test."""

    def __init__(self, loop: LoopThread, sockets: tuple[socket.socket, socket.socket]) -> None:
        self.loop = loop
        self.owner = Recorder()
        here, self.there = sockets
        self.connection: StreamConnection = open_connection(loop, here, self.owner)
        assert self.connection.direct is not None
        self.direct: DirectReading = self.connection.direct
        self.there.sendall(PREAMBLE)
        until(self.connection._decoder.is_between_frames)
        assert not self.direct.claim()  # has the loop prepare it
        loop.call(int)
        self.seen = 0

    def deadline(self) -> float:
        return time.monotonic() + SOON

    def since_the_last_look(self) -> list[tuple[int, int]]:
        """Kind and call of the frames that the loop has taken in since."""
        return [(each.kind, each.call_id) for each in self.owner.frames[self.seen :]]

    def arrived(self) -> list[tuple[int, int]]:
        """The same, and looks."""
        frames = self.owner.frames[self.seen :]
        self.seen += len(frames)
        return [(each.kind, each.call_id) for each in frames]

    def next_of_loop(self, count: int) -> list[tuple[int, int]]:
        """The same, once there are so many of them."""
        self.owner.wait_for(self.seen + count)
        return self.arrived()

    def loop_reads(self) -> None:
        """Whether the loop reads when no thread does."""
        self.there.sendall(frame(Kind.CALL, 999))
        until(lambda: self.owner.frames[self.seen :] and self.owner.frames[-1].call_id == 999)
        until(lambda: self.direct.role.holder() is None)

    def forgive(self) -> None:
        """Have the role tried again at once."""
        worth = self.direct.role.worth
        worth.was_of_use()
        while not worth.invites():
            pass
        self.direct._replies_soon = Promptness()
        self.direct._rests = 0
