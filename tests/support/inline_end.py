"""A worker's end of a connection where threads may read; the test has the other end, a bare socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.dispatcher import Dispatcher
from rpc.agent.received_requests import Request
from rpc.group.peer import Peer
from rpc.runtime.events import Events
from rpc.runtime.loop import LoopThread
from rpc.runtime.tasks import Task
from rpc.serialization.serializer import Serializer
from rpc.transport.base import Connection
from rpc.transport.inline_read import InlineReader, Turn
from rpc.wire.frames import PREAMBLE, Frame, Kind, encode
from tests.support.answering import table_of
from tests.support.members import peer
from tests.support.streams import SOON, Recorder, open_connection, skip_preamble, until

ON_LOOP = Kind.EXTENSION
"""A kind of frame that only the loop takes in."""
ANYWHERE = Kind.EXTENSION + 1
"""One that any thread may."""
_LONGEST_REST = 300


def frame(kind: int, call_id: int, payload: bytes = b"payload", **header: Any) -> bytes:
    return b"".join(encode(kind, call_id, header, [payload])[0])


class _Reserved(PendingCall):
    """A call for which a thread has claimed a turn at reading, as it does before it sends the request."""

    turn: Turn | None = None

    def wait(self, turn: Turn | None = None) -> None:
        turn, self.turn = turn or self.turn, None
        try:
            super().wait(turn)
        finally:
            if turn is not None and turn.left_to_loop is None:
                turn.reader.leave()


class _Table(CallTable):
    """A table of calls whose answers are bytes."""

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        return bytes(frame.buffers[0])


class Agent:
    """An agent's part in what comes in, and in calls."""

    def __init__(self, loop: LoopThread) -> None:
        self.calls = table_of(loop.loop, kind=_Table)
        self.passed_on: list[int] = []
        """Calls that were given to other threads."""
        self.lost: list[str] = []

    def run_soon(self, tasks: Sequence[Task]) -> None:
        self.passed_on += [task[1].frame.call_id for task in tasks]

    def lose(self, peer: Peer, reason: str) -> None:
        self.lost.append(reason)


class End(Recorder):
    """The connection's owner. Frames that the loop has received are in ``frames``.

    Attributes:
        there: the other end.
        taken: what frames of the kinds above were taken in, in order.
        meanwhile: called whenever a frame of the kind ``ANYWHERE`` is taken in.
        called: called whenever a request is taken in.
    """

    def __init__(
        self, loop: LoopThread, sockets: tuple[socket.socket, socket.socket], **options: Any
    ) -> None:
        super().__init__()
        self.here, self.there = sockets
        self.loop = loop
        self.peer = peer()
        self.agent = Agent(loop)
        self.taken: list[int] = []
        self.meanwhile: Callable[[], object] = int
        self.called: Callable[[], object] = int
        activity: Any = SimpleNamespace(listener=None)
        self.dispatcher = Dispatcher(
            Serializer(),
            Events(),
            activity,
            self.agent.run_soon,
            self.agent.lose,
            lambda *_: None,
        )
        self.dispatcher.on(Kind.CALL, self._take_call, any_thread=True)
        self.dispatcher.on(Kind.REPLY, self._take_reply, any_thread=True)
        self.dispatcher.on(Kind.FAILURE, self._take_reply, any_thread=True)
        self.dispatcher.on(ON_LOOP, self._take_on_loop)
        self.dispatcher.on(ANYWHERE, self._take_anywhere, any_thread=True)
        self.connection = open_connection(loop, self.here, self, **options)
        reader = self.connection.reader
        assert reader is not None
        self.reader: InlineReader = reader
        self.turn: Turn | None = None
        loop.call(self.peer.established, self.connection)
        skip_preamble(self.there)
        self.there.sendall(PREAMBLE)
        self.ready()

    def _take_call(self, peer: Peer, frame: Frame) -> Task:
        self.called()
        return (lambda _: None), Request(peer, frame)

    def _take_reply(self, peer: Peer, frame: Frame) -> None:
        self.agent.calls.received(peer, frame)

    def _take_on_loop(self, _: Peer, frame: Frame) -> None:
        self.taken.append(frame.call_id)

    def _take_anywhere(self, _: Peer, frame: Frame) -> None:
        self.taken.append(frame.call_id)
        self.meanwhile()

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        self.dispatcher.frames_received(self.peer, frames)
        super().frames_received(connection, frames)

    def take_inline(self, frames: list[Frame], *, keep: bool) -> Task | None:
        return self.dispatcher.take_inline(self.peer, frames, keep=keep)

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self.peer.gone(reason)
        for call in self.agent.calls.take_all(self.peer):
            call.settle(call.lost_error())
        super().connection_lost(connection, reason)

    def ready(self) -> None:
        """Wait until a thread may read: nobody does, and earlier failures are forgotten."""
        until(lambda: any(self.reader.claim() for _ in range(_LONGEST_REST)))
        self.reader.leave()

    def call(self, timeout: float = SOON) -> PendingCall:
        """A call under way, whose message was sent somehow."""
        return self.agent.calls.open(self.peer, "something", timeout, PendingCall)

    def reserved(self) -> PendingCall:
        """The same; the current thread is going to read its reply."""
        self.ready()
        call = self.agent.calls.open(self.peer, "something", SOON, _Reserved)
        call.turn = self.reader.claim()
        assert self.reader.is_read_by_thread()
        return call

    def loop_reads(self) -> None:
        """Check that the loop goes on."""
        before = len(self.frames)
        self.there.sendall(frame(ON_LOOP, 999))
        self.wait_for(before + 1)
        until(lambda: 999 in self.taken)
        self.taken.remove(999)
        until(lambda: not self.reader.is_read_by_thread())

    def claim_idle(self) -> bool:
        """As an idle thread: get ready for ``next_task``."""
        self.turn = self.reader.claim(idle=True)
        return self.turn is not None

    def next_task(self, timeout: float | None = SOON) -> int | None:
        """As an idle thread: the call that is to be run next."""
        task = None if self.turn is None else self.reader.next_task(self.turn, timeout)
        if task is None:
            return None
        request = task[1]
        assert isinstance(request, Request)
        return request.frame.call_id

    def close(self) -> None:
        self.loop.call(self.connection.close, "end of the test")
