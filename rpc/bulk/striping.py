"""Large messages over several TCP connections at once, where the network limits what one gets: by option.

With the option ``tcp_stripes``, two workers open *lanes* beside the connection between them, when the first
large message has been sent. Each is an ordinary connection; all share one queue of large messages and one
reassembly (``rpc.wire.chunking``), so each chunk goes over whichever lane takes it.

The side that has made the connection opens the lanes. It *asks*; the other side answers with an *offer*: how
many, and a token, which each lane says in the place of a hello. When all are welcome, the connecting side
says *ready*, and both send over them. The accepting side makes its offer unasked when it is the first to send
something large. Who cannot or shall not have lanes *refuses*; then all goes over the connection.

A worker that leaves says so on each lane, behind all chunks (*leaving*), and stays until the other has
received that on all of them (*left*): on the connection alone, a goodbye could overtake chunks. From then on
it means nothing that its lanes end. Otherwise the end of a lane is that of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

from rpc.errors import ProtocolError, RpcError
from rpc.group.connections import FAREWELL_SECONDS, Connections
from rpc.group.handshake import Lane, legible
from rpc.group.peer import Peer
from rpc.runtime.mailbox import Mailbox
from rpc.transport.base import Connection, SilentOwner
from rpc.transport.stream import StreamConnection
from rpc.wire.frames import Frame, Kind, encode, encode_small

__all__ = ["STRIPED_BYTES", "Striping"]

logger = logging.getLogger(__name__)

STRIPED_BYTES: Final = 1 << 20
"""Smaller messages are no reason to open lanes."""

_TOKEN_BYTES: Final = 16
_OPEN_SECONDS: Final = 20.0
"""How long all lanes to one peer may take to connect and to be welcome."""
_GRACE_SECONDS: Final = 0.2
"""When a lane ends, what has come on the connection is taken in first: it may say why."""


class _Lanes:
    """The lanes of one peer."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.dialled: list[Connection] = []
        """Those that this side has made."""
        self.open: dict[int, StreamConnection] = {}
        self.in_use = False
        self.leaving = 0
        """On how many lanes the peer has taken leave."""
        self.left: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None


class Striping:
    """All lanes of one agent, at most ``count`` to each peer; with 1, it neither asks for any nor accepts
    any.

    ``consider`` from any thread, everything else on the loop's.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mailbox: Mailbox,
        connections: Connections,
        receive: Callable[[Peer, list[Frame]], object],
        count: int,
        max_message_bytes: int,
    ) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._connections = connections
        self._receive = receive
        self._count = count
        self._max_message_bytes = max_message_bytes
        self._lanes: dict[Peer, _Lanes | None] = {}
        """None: not now, or not at all, but large messages need not ask any more."""
        self._said = False
        self._closed = False

    def consider(self, peer: Peer, size: int) -> None:
        """A message of so many bytes has been sent: see whether more connections to that worker would pay."""
        if self._count == 1 or size <= STRIPED_BYTES or peer in self._lanes or self._closed:
            return
        connection = peer.connection
        if connection is not None and connection.over_network:
            self._mailbox.call(self._begin, peer)

    def _begin(self, peer: Peer) -> None:
        if peer in self._lanes or self._closed or not peer.connected:
            return  # other threads had something for it, or it opened them itself
        self._lanes[peer] = None
        if peer.link.dialled:
            self._say(peer, {"ask": self._count})
        else:
            self._offer(peer, self._count)

    def _say(self, peer: Peer, header: dict[str, Any]) -> None:
        connection = peer.connection
        if connection is not None:  # what is said holds for this connection only
            connection.send_sign(encode_small(Kind.LANES, 0, header, ()))

    def _fall_back(self, peer: Peer, reason: str) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        logger.log(
            level, "messages for worker '%s' go over one connection, not several: %s", peer.name, reason
        )

    # ---- what peers say

    def received(self, peer: Peer, frame: Frame) -> None:
        """A peer says something about lanes."""
        for said, value in frame.header.items():
            match said, value:
                case "ask", int(count) if count >= 2 and not peer.link.dialled:
                    if self._lanes.get(peer) is None:  # else an offer was made while it asked
                        self._asked(peer, count)
                case "offer", [int(count), bytes(token)] if count >= 2 and len(token) == _TOKEN_BYTES:
                    self._offered(peer, count, token)
                case "ready", int(count):
                    self._ready(peer, count)
                case "refuse", reason:
                    self._refused(peer, reason)
                case "left", _:
                    self._has_left(peer)
                case _:
                    raise ProtocolError("a malformed message about lanes")

    def _asked(self, peer: Peer, count: int) -> None:
        if self._count == 1 or self._closed:
            self._say(peer, {"refuse": "the option tcp_stripes is 1 there"})
        else:
            self._offer(peer, min(count, self._count))

    def _offer(self, peer: Peer, count: int) -> None:
        lanes = self._lanes[peer] = _Lanes(count)
        self._say(peer, {"offer": [count, lanes.token]})

    def _offered(self, peer: Peer, count: int, token: bytes) -> None:
        if self._lanes.get(peer) is not None or not peer.link.dialled:
            raise ProtocolError("it offers lanes for the second time, or is not the one to offer any")
        if self._count == 1 or self._closed:
            self._say(peer, {"refuse": "the option tcp_stripes is 1 there"})
            return
        lanes = self._lanes[peer] = _Lanes(min(count, self._count))
        lanes.token = token
        lanes.task = self._loop.create_task(self._connect(peer, lanes))

    def _ready(self, peer: Peer, count: int) -> None:
        lanes = self._lanes.get(peer)
        if lanes is None or lanes.in_use or count != len(lanes.open) or {*lanes.open} != {*range(count)}:
            raise ProtocolError("it says that lanes are ready which are not there")
        self._use(peer, lanes)

    def _refused(self, peer: Peer, reason: object) -> None:
        lanes = self._lanes.get(peer)
        if lanes is not None and lanes.in_use:
            raise ProtocolError("it refuses the lanes that it has")
        self._close_lanes(peer)
        self._fall_back(peer, legible(reason))

    def _has_left(self, peer: Peer) -> None:
        lanes = self._lanes.get(peer)
        if lanes is None or lanes.left is None:
            raise ProtocolError("it lets this worker go, which does not leave")
        if not lanes.left.done():
            lanes.left.set_result(None)

    # ---- opening them

    def lane_came(self, connection: Connection, lane: Lane) -> None:
        """Somebody who belongs to the job has connected and says to be a lane: take the connection over;
        ``ProtocolError`` if that is not true.
        """
        token, number = lane.token, lane.number
        if not isinstance(connection, StreamConnection):
            raise ProtocolError("a lane over a connection that takes none")
        for peer, lanes in self._lanes.items():  # noqa: B007
            if lanes is not None and not lanes.in_use and secrets.compare_digest(lanes.token, token):
                break
        else:
            raise ProtocolError("a lane that belongs to no connection, or comes too late")
        if not 0 <= number < lanes.count or number in lanes.open or peer.link.dialled:
            raise ProtocolError(f"a lane of the number {number!r}, where {lanes.count} are expected once")
        self._add(peer, lanes, number, connection)

    async def _connect(self, peer: Peer, lanes: _Lanes) -> None:
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                for number in range(lanes.count):
                    connection = await self._connections.open_lane(peer, Lane(lanes.token, number))
                    lanes.dialled.append(connection)
                    assert isinstance(connection, StreamConnection)
                    self._add(peer, lanes, number, connection)
        except BaseException as error:
            for connection in lanes.dialled:
                connection.owner = SilentOwner()
                connection.close("not all lanes can be opened")
            if not isinstance(error, OSError | RpcError):
                raise
            if peer.lost is None and not self._closed:
                self._lanes[peer] = None
                reason = str(error) or "it takes too long to connect"
                self._fall_back(peer, reason)
                self._say(peer, {"refuse": reason})
        else:
            self._say(peer, {"ready": lanes.count})
            self._use(peer, lanes)

    def _add(self, peer: Peer, lanes: _Lanes, number: int, connection: StreamConnection) -> None:
        """A lane is there: what comes on it is taken in from now on."""
        main = peer.connection
        if not isinstance(main, StreamConnection):
            raise ProtocolError("a lane to a worker that is gone")
        connection.description = f"worker '{peer.name}', lane {number + 1}"
        connection.owner = _LaneOwner(self, peer)
        lanes.open[number] = connection
        arriving = main.lanes[1]
        arriving.lanes = lanes.count + 1
        connection.set_frame_limits(self._max_message_bytes, peer.member.max_message_bytes)
        connection.receive_with(number + 1, arriving)

    def _use(self, peer: Peer, lanes: _Lanes) -> None:
        """All lanes are there: send over them."""
        main = peer.connection
        if isinstance(main, StreamConnection):
            lanes.in_use = True
            for number, connection in lanes.open.items():
                connection.send_with(number + 1, main.lanes[0])
            logger.debug("large messages for worker '%s' go over %d lanes", peer.name, len(lanes.open))

    # ---- what comes on them

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        """Large messages, whole, and at last the leave that the peer takes."""
        messages: list[Frame] = []
        for frame in frames:
            if frame.kind != Kind.LANES:
                messages.append(frame)
                continue
            lanes = self._lanes.get(peer)
            if lanes is None or frame.header != {"leaving": True}:
                raise ProtocolError("a malformed message on a lane")
            lanes.leaving += 1
            if lanes.leaving == len(lanes.open):
                self._loop.call_soon(self._say, peer, {"left": True})
        if messages and peer.lost is None:
            self._receive(peer, messages)

    def lane_lost(self, peer: Peer, reason: str) -> None:
        lanes = self._lanes.get(peer)
        if lanes is not None and not lanes.leaving and lanes.left is None:
            self._loop.call_later(
                _GRACE_SECONDS, self._break, peer, lanes, f"a lane of its connection was lost: {reason}"
            )

    def _break(self, peer: Peer, lanes: _Lanes, reason: str) -> None:
        if self._lanes.get(peer) is lanes and peer.connection is not None:  # not one made since
            peer.connection.close(reason)

    # ---- the end

    async def finish(self) -> None:
        """This worker leaves: wait until all that went over lanes has arrived, but not for ever."""
        self._closed = True
        leaving: list[asyncio.Future[None]] = []
        buffers, size = encode(Kind.LANES, 0, {"leaving": True}, ())
        for lanes in self._lanes.values():
            if lanes is not None and lanes.task is not None:
                lanes.task.cancel()
            if lanes is not None and lanes.in_use:
                lanes.left = self._loop.create_future()
                leaving.append(lanes.left)
                for connection in lanes.open.values():
                    with contextlib.suppress(RpcError):
                        connection.send(buffers, size, wait=False, last=True)
        if leaving:
            await asyncio.wait(leaving, timeout=FAREWELL_SECONDS)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """A worker is gone: so are the lanes to it."""
        self.peer_broke(peer)

    def peer_broke(self, peer: Peer) -> None:
        """The connection to a worker broke: so have its lanes."""
        self._close_lanes(peer)
        self._lanes.pop(peer, None)

    def _close_lanes(self, peer: Peer) -> None:
        lanes = self._lanes.get(peer)
        self._lanes[peer] = None
        if lanes is None:
            return
        if lanes.task is not None and not lanes.in_use:
            lanes.task.cancel()
        if lanes.left is not None and not lanes.left.done():
            lanes.left.set_result(None)
        for connection in lanes.open.values():
            connection.owner = SilentOwner()
            connection.close("its worker is gone")

    def close(self) -> None:
        """This worker has left."""
        self._closed = True
        for peer in list(self._lanes):
            self._close_lanes(peer)

    def abandon(self) -> None:
        """In a forked child: let go of what the parent goes on using, without taking a lock."""
        for lanes in self._lanes.values():
            for connection in (*lanes.dialled, *lanes.open.values()) if lanes is not None else ():
                connection.abandon()


class _LaneOwner(SilentOwner):
    """Owner of a lane."""

    def __init__(self, striping: Striping, peer: Peer) -> None:
        self._striping = striping
        self._peer = peer

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        try:
            self._striping.frames_received(self._peer, frames)
        except ProtocolError as error:
            connection.close(str(error))

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self._striping.lane_lost(self._peer, reason)
