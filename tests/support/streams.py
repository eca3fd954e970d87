"""What tests of connections need: a loop, sockets, and an owner that notes what it is told."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rpc.runtime.loop import LoopThread
from rpc.transport.base import (
    Connection,
    ConnectionClosed,
    ConnectionOwner,
    DirectConnection,
    TransportContext,
)
from rpc.transport.byte_stream import SocketStream
from rpc.transport.stream import StreamConnection
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE, Frame, encode

TINY_BUFFER = 4608
"""The smallest send buffer that a socket can be given, in bytes."""

SOON = 40.0
"""Seconds after which something that should happen at once is held not to happen."""


Sockets = Callable[..., tuple[socket.socket, socket.socket]]
"""What the fixture ``sockets`` gives: ``sockets(family, buffer_bytes)`` makes two connected ones."""


class Recorder(ConnectionOwner):
    """An owner that keeps the frames and the reason of the end, and lets other threads wait for them."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.reasons: list[str] = []
        self.lost = threading.Event()
        self._changed = threading.Condition()

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        with self._changed:
            self.frames += frames
            self._changed.notify_all()

    def connection_lost(self, connection: Connection, reason: str) -> None:
        self.reasons.append(reason)
        self.lost.set()

    def wait_for(self, count: int) -> list[Frame]:
        """The first ``count`` frames, as soon as they are there."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.frames) >= count, SOON), len(self.frames)
            return self.frames[:count]

    def reason(self) -> str:
        """Why the connection ended, once it has; it is told once."""
        assert self.lost.wait(SOON)
        assert len(self.reasons) == 1
        return self.reasons[0]


class Recording(DirectConnection):
    """A connection that keeps what is sent by it, and breaks before it has written what is ``queued``. One
    that ``is_broken`` takes nothing large any more.
    """

    def __init__(self, *queued: bytes, is_broken: bool = False) -> None:
        super().__init__("the other side")
        self.sent: list[bytes] = []
        self._queued = list(queued)
        self._is_broken = is_broken

    def pass_on(self, frame: bytearray) -> None:
        if self._is_broken and len(frame) > 100:
            raise ConnectionClosed("it has just failed to write")
        self.sent.append(bytes(frame))

    def remains(self) -> list[bytes]:
        return self._queued


def connected_sockets(family: str, buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Two ends of a ``unix`` or ``tcp`` connection, whose send buffers may be made small."""
    if family == "unix":
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            here = socket.create_connection(listener.getsockname(), SOON)
            there, _ = listener.accept()
    if buffer_bytes:
        for sock in (here, there):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    there.settimeout(SOON)
    return here, there


def reset(sock: socket.socket) -> None:
    """Close it, so that the other end is told that the connection was reset, whatever it has sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def until_broken(sock: socket.socket) -> None:
    """Wait until the kernel knows that the connection of this end is broken, and has not told yet."""
    poll = select.poll()
    poll.register(sock, 0)
    assert poll.poll(1000 * SOON)[0][1] & select.POLLERR


def open_connection(
    thread: LoopThread,
    sock: socket.socket,
    owner: Recorder,
    *,
    send_queue_bytes: int = 1 << 30,
    over_network: bool = False,
) -> StreamConnection:
    """A started connection that may receive frames of any size."""

    def start() -> StreamConnection:
        context = TransportContext(asyncio.get_running_loop(), send_queue_bytes)
        stream = SocketStream(context.loop, sock)
        connection = StreamConnection(context, stream, "the peer", over_network=over_network)
        connection.set_frame_limits(1 << 30, 1 << 30)
        connection.start(owner)
        return connection

    return thread.call(start)


def send(connection: Connection, header: dict[str, Any], payload: Any = b"", **options: Any) -> None:
    """Send one frame with a header and one segment."""
    buffers, size = encode(5, 0, header, [payload])
    connection.send(buffers, size, **options)


def frame_bytes(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """The same frame as it looks on the wire."""
    return b"".join(encode(5, 0, header, [payload])[0])


def read_all(sock: socket.socket) -> list[Frame]:
    """What a raw socket receives until the other end closes."""
    decoder = Decoder(1 << 30)
    frames: list[Frame] = []
    while count := sock.recv_into(decoder.buffer()):
        frames += decoder.received(count)
    return frames


def skip_preamble(sock: socket.socket) -> None:
    """Receive the preamble, with which every connection opens."""
    assert sock.recv(len(PREAMBLE), socket.MSG_WAITALL) == PREAMBLE


def until(condition: Callable[[], object]) -> None:
    """Wait for something that no event tells."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.0003)


class Pair:
    """Two connections to each other, on one loop."""

    def __init__(self, loop: LoopThread, sockets: tuple[socket.socket, socket.socket]) -> None:
        self._loop = loop
        self.here_owner, self.there_owner = Recorder(), Recorder()
        self.here = open_connection(loop, sockets[0], self.here_owner)
        sockets[1].settimeout(None)
        self.there = open_connection(loop, sockets[1], self.there_owner)

    def close(self) -> None:
        self._loop.call(self.here.close, "end of the test")
        self._loop.call(self.there.close, "end of the test")


def headers(frames: Iterable[Frame]) -> list[dict[str, Any]]:
    return [frame.header for frame in frames]
