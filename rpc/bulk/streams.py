"""Bulk streams: separate connections for the largest messages between two workers on different hosts.

A small message never waits behind a large one: the connection carries small messages, and the bulk streams
the bytes of large ones. Threads that block in the kernel write from the sender's memory and read into the
posted buffer, or into the message's own memory (``stream_ends.py``). Each stream carries data in one
direction. There are up to ``tcp_stripes`` for each direction.

They are opened when the first large message has been sent, which itself goes over the connection. The side
that has made the connection opens them. It *asks*; the other side answers with an *offer*: the number of
streams for each direction, and a token, which each stream sends instead of a hello. Even numbers carry data
from the side that opens them, odd ones to it. When all are accepted, the connecting side sends *ready*, and
both send over them. The accepting side makes its offer without being asked if it is the first to send a large
message. Either side may *refuse*; then everything goes over the connection.

*Exactly once.* A message that is sent over streams has a number of the session, as all large messages have.
The end of a stream ends the connection: messages that had not arrived are lost, and sent again or reported,
as if they had been sent over the connection itself. A message counts as arrived when it is dispatched, within
``_Streams.gate``; once ``peer_broke`` has held that, nothing more that the streams bring is dispatched.

*Leaving.* The last frame of a stream says that its sender leaves. A worker that has it on all streams says so
on the connection (*left*), since a goodbye could overtake the streams otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rpc.bulk.stream_ends import BulkQueue, StreamReader
from rpc.errors import ProtocolError, RpcError
from rpc.group.connections import FAREWELL_SECONDS, Connections
from rpc.group.handshake import Stream
from rpc.group.peer import Peer
from rpc.runtime.legible import legible
from rpc.runtime.mailbox import Mailbox
from rpc.transport.base import Connection, ConnectionOwner
from rpc.transport.bulk_socket import BulkSocket
from rpc.transport.stream import StreamConnection
from rpc.transport.write_queue import STREAMED_BYTES
from rpc.wire.frames import Frame, Kind, LargeFrame, encode_small, open_message
from rpc.wire.reassembly import Reassembly

__all__ = ["BulkStreams"]

logger = logging.getLogger(__name__)

_TOKEN_BYTES: Final = 16
_OPEN_SECONDS: Final = 20.0
"""Timeout in seconds for opening all streams to one peer."""
_GRACE_SECONDS: Final = 0.2
"""Time in seconds between the end of a stream and that of its connection, on which a goodbye may have
arrived.
"""
_THREADS_SECONDS: Final = 1.0
"""Timeout in seconds for threads to end when this worker has left."""
_MAX_STREAMS: Final = 64


class _Streams:
    """The streams of one peer, from the offer on.

    Attributes:
        count: number of streams for each direction.
        gate: held while a message is opened or dispatched, and while ``is_closed`` is set.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.sockets: dict[int, BulkSocket] = {}
        """The sockets that are open, until they are in use."""
        self.queue: BulkQueue | None = None
        self.readers: list[StreamReader] = []
        self.gate = threading.Lock()
        self.is_closed = False
        self.left_by_peer = 0
        """Number of streams on which the peer has said that it leaves."""
        self.left: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def in_use(self) -> bool:
        return self.queue is not None

    @property
    def threads(self) -> int:
        queue = 0 if self.queue is None else self.queue.threads
        return queue + sum(reader.is_running for reader in self.readers)

    def close(self) -> None:
        """Close them. Nothing that they bring is dispatched once this returns."""
        with self.gate:
            self.is_closed = True
        if self.task is not None:
            self.task.cancel()
        if self.left is not None and not self.left.done():
            self.left.set_result(None)
        for sock in self.sockets.values():
            sock.shut_down()
            sock.close()
        self.sockets.clear()
        if self.queue is not None:
            self.queue.close()
        for reader in self.readers:
            reader.close()


class BulkStreams:
    """The bulk streams of one agent. ``consider`` from any thread, all other methods on the loop's thread.

    Args:
        receive: dispatches messages, on the loop's thread.
        receive_bulk: dispatches a message of the kind ``BULK``, on any thread.
        count: maximum number of streams for each direction, to each peer; 0: none are opened or accepted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mailbox: Mailbox,
        connections: Connections,
        receive: Callable[[Peer, list[Frame]], object],
        receive_bulk: Callable[[Peer, LargeFrame], object],
        count: int,
        max_message_bytes: int,
        send_queue_bytes: int,
    ) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._connections = connections
        self._receive, self._receive_bulk = receive, receive_bulk
        self._count = count
        self._max_message_bytes = max_message_bytes
        self._send_queue_bytes = send_queue_bytes
        self._streams: dict[Peer, _Streams | None] = {}
        """The streams by peer. None: there are none for now, or never, and large messages need not ask
        again.
        """
        self._ending: list[_Streams] = []
        """Closed streams, some of whose threads may not have ended."""
        self._thread_ended = asyncio.Event()
        self._has_told = False
        self._closed = False

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.STREAMS, self.received)

    def consider(self, peer: Peer, size: int) -> None:
        """Open streams to a worker if that is worthwhile, now that a message of ``size`` bytes was sent to
        it.
        """
        if not self._count or size < STREAMED_BYTES or peer in self._streams or self._closed:
            return
        connection = peer.connection
        if connection is not None and connection.over_network:
            self._mailbox.call(self._begin, peer)

    @property
    def threads(self) -> int:
        """Number of threads that send or receive."""
        return sum(streams.threads for streams in list(self._streams.values()) if streams is not None)

    def _begin(self, peer: Peer) -> None:
        if peer in self._streams or self._closed or not peer.connected:
            return  # other threads had something for it, or it opened them itself
        self._streams[peer] = None
        if peer.link.dialled:
            self._say(peer, {"ask": self._count})
        else:
            self._offer(peer, self._count)

    def _say(self, peer: Peer, header: dict[str, Any]) -> None:
        connection = peer.connection
        if connection is not None:  # messages about streams concern this connection only
            connection.send_unnumbered(encode_small(Kind.STREAMS, 0, header, ()))

    def _fall_back(self, peer: Peer, reason: str) -> None:
        level = logging.DEBUG if self._has_told else logging.WARNING
        self._has_told = True
        logger.log(
            level,
            "large messages for worker '%s' go over the connection, not bulk streams: %s",
            peer.name,
            reason,
        )

    # ---- what peers say

    def received(self, peer: Peer, frame: Frame) -> None:
        """Handle a peer's message about bulk streams."""
        for said, value in frame.header.items():
            match said, value:
                case "ask", int(count) if 1 <= count <= _MAX_STREAMS and not peer.link.dialled:
                    if self._streams.get(peer) is None:  # otherwise an offer was made while the peer asked
                        self._asked(peer, count)
                case "offer", [int(count), bytes(token)] if (
                    1 <= count <= _MAX_STREAMS and len(token) == _TOKEN_BYTES
                ):
                    self._offered(peer, count, token)
                case "ready", int(count):
                    self._ready(peer, count)
                case "refuse", reason:
                    self._refused(peer, reason)
                case "left", _:
                    self._has_left(peer)
                case _:
                    raise ProtocolError("a malformed message about bulk streams")

    def _asked(self, peer: Peer, count: int) -> None:
        if not self._count or self._closed:
            self._say(peer, {"refuse": "the option tcp_stripes is 0 there"})
        else:
            self._offer(peer, min(count, self._count))

    def _offer(self, peer: Peer, count: int) -> None:
        streams = self._streams[peer] = _Streams(count)
        self._say(peer, {"offer": [count, streams.token]})

    def _offered(self, peer: Peer, count: int, token: bytes) -> None:
        if self._streams.get(peer) is not None or not peer.link.dialled:
            raise ProtocolError("it offers bulk streams for the second time, or is not the one to offer any")
        if not self._count or self._closed:
            self._say(peer, {"refuse": "the option tcp_stripes is 0 there"})
            return
        streams = self._streams[peer] = _Streams(min(count, self._count))
        streams.token = token
        streams.task = self._loop.create_task(self._connect(peer, streams))

    def _ready(self, peer: Peer, count: int) -> None:
        streams = self._streams.get(peer)
        if streams is None or streams.in_use or {*streams.sockets} != {*range(2 * count)} or not count:
            raise ProtocolError("it says that bulk streams are ready which are not there")
        streams.count = count
        self._use(peer, streams)

    def _refused(self, peer: Peer, reason: object) -> None:
        streams = self._streams.get(peer)
        if streams is not None and streams.in_use:
            raise ProtocolError("it refuses the bulk streams that it has")
        self._close_streams(peer)
        self._fall_back(peer, legible(reason))

    def _has_left(self, peer: Peer) -> None:
        streams = self._streams.get(peer)
        if streams is None or streams.left is None:
            raise ProtocolError("it lets this worker go, which does not leave")
        if not streams.left.done():
            streams.left.set_result(None)

    # ---- opening them

    def stream_came(self, connection: Connection, stream: Stream) -> Callable[[], object]:
        """Handle a connection of a worker of the job that says that it is a bulk stream. Returns the function
        that takes it over. Raises ``ProtocolError`` if no such stream is expected.
        """
        token, number = stream.token, stream.number
        if not isinstance(connection, StreamConnection):
            raise ProtocolError("a bulk stream over a connection that cannot be one")
        for peer, streams in self._streams.items():  # noqa: B007
            if streams is not None and not streams.in_use and secrets.compare_digest(streams.token, token):
                break
        else:
            raise ProtocolError("a bulk stream that belongs to no connection, or comes too late")
        if not 0 <= number < 2 * streams.count or number in streams.sockets or peer.link.dialled:
            raise ProtocolError(
                f"a bulk stream of the number {number!r}, of {2 * streams.count} that are expected"
            )
        return partial(self._add, streams, number, connection)

    async def _connect(self, peer: Peer, streams: _Streams) -> None:
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                for number in range(2 * streams.count):
                    connection = await self._connections.open_stream(peer, Stream(streams.token, number))
                    assert isinstance(connection, StreamConnection)
                    self._add(streams, number, connection)
        except BaseException as error:
            if not isinstance(error, OSError | RpcError):
                raise
            if self._streams.get(peer) is streams and peer.lost is None and not self._closed:
                streams.task = None
                self._close_streams(peer)
                reason = str(error) or "it takes too long to connect"
                self._fall_back(peer, reason)
                self._say(peer, {"refuse": reason})
        else:
            streams.task = None
            self._say(peer, {"ready": streams.count})
            self._use(peer, streams)

    def _add(self, streams: _Streams, number: int, connection: StreamConnection) -> None:
        """Add a stream that is accepted."""
        connection.owner = ConnectionOwner()
        streams.sockets[number] = connection.detach()

    def _use(self, peer: Peer, streams: _Streams) -> None:
        """Send and receive over the streams, once all of them are there."""
        main = peer.connection
        if not isinstance(main, StreamConnection):
            self._close_streams(peer)
            return
        mine = 0 if peer.link.dialled else 1
        ended = partial(self._mailbox.call, self._thread_ended.set)
        streams.queue = BulkQueue(
            [sock for number, sock in sorted(streams.sockets.items()) if number % 2 == mine],
            peer.member.max_message_bytes,
            self._send_queue_bytes,
            failed=partial(self._failed, peer, streams, False),
            open_first=main.send_unnumbered,
            ended=ended,
        )
        main.arriving.streams = streams.count
        for number, sock in sorted(streams.sockets.items()):
            if number % 2 != mine:
                reader = StreamReader(
                    self._loop,
                    sock,
                    main.arriving,
                    opened=partial(self._opened, streams, main.arriving),
                    received=partial(self._came, peer, streams),
                    left=partial(self._mailbox.call, self._peer_leaves, peer, streams),
                    failed=partial(self._failed, peer, streams),
                    ended=ended,
                )
                streams.readers.append(reader)
                reader.watch()
        streams.sockets.clear()
        main.send_large_by(streams.queue)
        logger.debug("large messages for worker '%s' go over %d bulk streams", peer.name, streams.count)

    # ---- what comes on them, on the threads that read

    def _opened(self, streams: _Streams, arriving: Reassembly, number: int, opening: memoryview) -> None:
        with streams.gate:
            if streams.is_closed:  # no buffer may be found for it that another connection's message gets
                raise ConnectionError("the connection has ended")
            open_message(arriving, number, opening, self._max_message_bytes, on_stream=True)

    def _came(self, peer: Peer, streams: _Streams, frame: LargeFrame) -> None:
        if frame.kind != Kind.BULK:  # the loop may still have to handle what arrived before its opening
            self._mailbox.call(self._take_in, peer, streams, frame)
            return
        with streams.gate:
            if not streams.is_closed:
                self._receive_bulk(peer, frame)

    def _take_in(self, peer: Peer, streams: _Streams, frame: LargeFrame) -> None:
        """Dispatch messages. On the loop's thread."""
        if not streams.is_closed and peer.lost is None:
            self._receive(peer, [frame])

    def _failed(self, peer: Peer, streams: _Streams, malformed: bool, reason: str) -> None:
        self._mailbox.call(self._has_failed, peer, streams, malformed, reason)

    def _has_failed(self, peer: Peer, streams: _Streams, malformed: bool, reason: str) -> None:
        if streams.is_closed or self._streams.get(peer) is not streams:
            return
        if malformed:
            self._connections.lose(peer, f"it sent a malformed message: {reason}")
        elif streams.left is None and not streams.left_by_peer:
            self._loop.call_later(_GRACE_SECONDS, self._break, peer, streams, reason)

    def _break(self, peer: Peer, streams: _Streams, reason: str) -> None:
        if self._streams.get(peer) is streams and peer.connection is not None:  # not one made since
            peer.connection.close(f"a bulk stream beside its connection was lost: {reason}")

    def _peer_leaves(self, peer: Peer, streams: _Streams) -> None:
        streams.left_by_peer += 1
        if streams.left_by_peer == streams.count and not streams.is_closed:
            self._loop.call_soon(self._say, peer, {"left": True})

    # ---- the end

    async def finish(self) -> None:
        """Wait until everything sent over streams has arrived, within limits, before this worker leaves."""
        self._closed = True
        leaving: list[asyncio.Future[None]] = []
        for streams in self._streams.values():
            if streams is not None and streams.task is not None:
                streams.task.cancel()
            if streams is not None and streams.queue is not None:
                streams.left = self._loop.create_future()
                leaving.append(streams.left)
                streams.queue.leave()
        if leaving:
            await asyncio.wait(leaving, timeout=FAREWELL_SECONDS)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """Close the streams of a worker that is lost."""
        self.peer_broke(peer)

    def peer_broke(self, peer: Peer) -> None:
        """Close the streams of a worker whose connection broke."""
        self._close_streams(peer)
        self._streams.pop(peer, None)

    def _close_streams(self, peer: Peer) -> None:
        streams = self._streams.get(peer)
        self._streams[peer] = None
        if streams is not None:
            streams.close()
            self._ending = [each for each in (*self._ending, streams) if each.threads]

    async def close(self) -> None:
        """Close all streams: this worker has left."""
        self._closed = True
        for peer in list(self._streams):
            self._close_streams(peer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_THREADS_SECONDS):
                while any(streams.threads for streams in self._ending):
                    self._thread_ended.clear()
                    await self._thread_ended.wait()

    def abandon(self) -> None:
        """Release everything in a forked child, without taking a lock; the parent continues to use its
        own.
        """
        for streams in self._streams.values():
            if streams is not None:
                for sock in streams.sockets.values():
                    sock.abandon()
                for reader in streams.readers:
                    reader.abandon()
                if streams.queue is not None:
                    streams.queue.abandon()
