"""Large messages on a stream connection: between small ones, from where they lie, and no copy but one."""

from __future__ import annotations

import socket
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport import CAPTURED_BYTES, ConnectionClosed, QueueFull
from rpc.transport.sending import CAPTURE_ALL
from rpc.transport.stream import StreamConnection
from rpc.wire import decoder
from rpc.wire.chunking import CHUNK_BYTES, SHORT_CHUNK_BYTES, Outgoing
from rpc.wire.frames import (
    PREAMBLE,
    PREFIX_BYTES,
    Kind,
    chunk_prefix,
    chunked,
    encode,
    unpack_prefix,
)
from tests.support.streams import (
    SOON,
    Pair,
    Recorder,
    Sockets,
    open_connection,
    read_all,
    send,
    skip_preamble,
)

LARGE = 2 * CAPTURED_BYTES
BUFFER = 64 << 10
"""Much less than that."""


def flush(loop: LoopThread, connection: StreamConnection) -> None:
    loop.call(lambda: connection.close("done", flush=True))


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_small_messages_overtake_large_ones_and_stay_in_order(
    loop: LoopThread, sockets: Sockets, family: str
) -> None:
    here, there = sockets(family, BUFFER)
    connection = open_connection(loop, here, Recorder())
    send(connection, {"large": 0}, bytes(LARGE))
    for index in range(100):
        send(connection, {"small": index}, b"x")
    flush(loop, connection)
    headers = [frame.header for frame in read_all(there)]
    assert headers == [*({"small": index} for index in range(100)), {"large": 0}]


def test_chunks_get_short_when_a_small_message_comes(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=BUFFER)
    connection = open_connection(loop, here, Recorder())
    send(connection, {}, bytes(3 * CHUNK_BYTES))
    send(connection, {}, b"small")
    flush(loop, connection)
    skip_preamble(there)
    chunks = [length for kind, length in frames_on_the_wire(there) if kind == Kind.CHUNK]
    assert chunks == [CHUNK_BYTES, *8 * [SHORT_CHUNK_BYTES]]


def frames_on_the_wire(sock: socket.socket) -> list[tuple[int, int]]:
    """The kind of each frame that comes until the other end closes, chunks as such, and its bytes."""
    frames: list[tuple[int, int]] = []
    with sock.makefile("rb") as stream:
        while prefix := stream.read(PREFIX_BYTES):
            length, *_, kind = unpack_prefix(prefix)
            assert len(stream.read(length)) == length
            frames.append((kind, length))
    return frames


def test_large_messages_share_the_connection(loop: LoopThread, sockets: Sockets) -> None:
    """One that begins later and is shorter is there first."""
    here, there = sockets(buffer_bytes=BUFFER)
    connection = open_connection(loop, here, Recorder())
    send(connection, {"large": 0}, bytes(LARGE))
    send(connection, {"large": 1}, bytes(LARGE // 4))
    flush(loop, connection)
    assert [frame.header["large"] for frame in read_all(there)] == [1, 0]


def test_the_last_frame_is_last(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=BUFFER)
    connection = open_connection(loop, here, Recorder())
    send(connection, {"large": 0}, bytes(LARGE))

    def leave() -> None:
        buffers, size = encode(4, 0, {"farewell": 1}, ())
        connection.send(buffers, size, wait=0, last=True)
        connection.close("done", flush=True)

    loop.call(leave)
    assert [frame.header for frame in read_all(there)] == [{"large": 0}, {"farewell": 1}]


def test_the_last_frame_does_not_overtake_what_a_thread_has_just_begun_to_send(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = sockets(buffer_bytes=BUFFER)
    connection = open_connection(loop, here, Recorder())
    loop.call(lambda: None)  # the preamble is out
    write = connection._write

    def leave() -> None:
        buffers, size = encode(4, 0, {"farewell": 1}, ())
        connection.send(buffers, size, wait=0, last=True)
        connection.close("done", flush=True)

    def write_while_the_loop_leaves(batch: list[Any]) -> int:
        monkeypatch.setattr(connection, "_write", write)
        loop.call(leave)
        return write(batch)

    monkeypatch.setattr(connection, "_write", write_while_the_loop_leaves)
    send(connection, {"large": 0}, bytes(LARGE))
    assert [frame.header for frame in read_all(there)] == [{"large": 0}, {"farewell": 1}]


def test_threads_that_send_large_and_small_at_once_lose_nothing(loop: LoopThread, sockets: Sockets) -> None:
    pair = Pair(loop, sockets("tcp"))
    sizes = [10, CHUNK_BYTES, 3_000_000, 100_000, 300_000, 1_500_001]

    def talk(thread: int, connection: StreamConnection) -> None:
        for index, size in enumerate(sizes * 3):
            fill = (50 * thread + index) % 256
            send(connection, {"fill": fill}, bytearray([fill]) * size, aliased=index % 2 == 0)

    ends = [pair.here, pair.there] * 2
    threads = [threading.Thread(target=talk, args=(number, end)) for number, end in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for owner in (pair.here_owner, pair.there_owner):
        frames = owner.wait_for(2 * 3 * len(sizes))
        for frame in frames:
            (segment,) = frame.buffers
            assert bytes(segment) == bytes([frame.header["fill"]]) * len(segment)
        assert sorted(len(frame.buffers[0]) for frame in frames) == sorted(6 * sizes)
    pair.close()


@pytest.mark.parametrize(
    ("size", "captured_bytes", "captured"),
    [
        (CAPTURED_BYTES, CAPTURED_BYTES, True),
        (LARGE, CAPTURED_BYTES, False),
        (LARGE, CAPTURE_ALL, True),
    ],
)
@pytest.mark.parametrize("others_wait", [False, True])
def test_what_is_captured(
    loop: LoopThread, sockets: Sockets, size: int, captured_bytes: int, captured: bool, others_wait: bool
) -> None:
    here, there = sockets("tcp", BUFFER)

    def start() -> StreamConnection:
        connection = StreamConnection(loop.loop, here, "the peer", 1 << 30, captured_bytes)
        connection.set_frame_limits(1 << 30, 1 << 30)
        connection.start(Recorder())
        return connection

    connection = loop.call(start)
    if others_wait:
        send(connection, {}, bytes(LARGE))
    memory = bytearray(size)
    send(connection, {"it": 1}, memory, aliased=True)
    memory[-1] = 255
    flush(loop, connection)
    (frame,) = [frame for frame in read_all(there) if frame.header]
    assert frame.buffers[0][-1] == (0 if captured else 255)


def test_small_messages_do_not_wait_for_the_room_that_large_ones_want(
    loop: LoopThread, sockets: Sockets
) -> None:
    here, there = sockets(buffer_bytes=BUFFER)
    connection = open_connection(loop, here, Recorder(), send_queue_bytes=CAPTURED_BYTES)
    send(connection, {"large": 0}, bytes(LARGE))
    with pytest.raises(QueueFull, match="the peer does not take"):
        send(connection, {"large": 1}, bytes(LARGE), wait=0.01)
    send(connection, {"small": 0}, wait=0.01)
    flush(loop, connection)
    assert len(read_all(there)) == 2


def test_a_caller_that_waits_for_room_goes_on_when_there_is_some(loop: LoopThread, sockets: Sockets) -> None:
    pair = Pair(loop, sockets(buffer_bytes=BUFFER))
    pair.here._queue_limit = 0
    for index in range(20):
        send(pair.here, {"large": index}, bytes(500_000))
    assert len(pair.there_owner.wait_for(20)) == 20
    pair.close()


def test_a_connection_lost_within_a_large_message_lets_go_of_everything(
    loop: LoopThread, sockets: Sockets
) -> None:
    here, there = sockets(buffer_bytes=BUFFER)
    owner = Recorder()
    connection = open_connection(loop, here, owner, send_queue_bytes=1)
    send(connection, {}, bytes(LARGE))
    refused: list[ConnectionClosed] = []

    def wait_for_room() -> None:
        with pytest.raises(ConnectionClosed) as caught:
            send(connection, {}, bytes(LARGE))
        refused.append(caught.value)

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    skip_preamble(there)
    there.recv(100_000)
    there.close()
    assert "broke" in owner.reason() or "closed by the other side" in owner.reason()
    waiting.join()
    assert len(refused) == 1
    assert not connection._outgoing
    assert connection._outgoing_bytes == 0


def test_what_has_come_of_a_large_message_is_let_go_with_the_connection(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    begun = threading.Event()

    def allocate(length: int) -> memoryview:
        block = np.empty(length, np.uint8)
        made.append(weakref.ref(block))
        begun.set()
        return block.data

    monkeypatch.setattr(decoder, "allocate", allocate)
    here, there = sockets()
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    buffers, size = encode(5, 0, {}, [bytes(LARGE)])
    message = chunked(buffers, size, 0)
    there.sendall(PREAMBLE + b"".join(Outgoing(chunk_prefix, LARGE).chunk(message)))
    assert begun.wait(SOON)
    there.close()
    owner.reason()
    loop.call(lambda: None)  # the loop has left the connection
    assert made[0]() is None
    assert not connection._open


def test_half_a_large_message_never_arrives(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=BUFFER)
    owner = Recorder()
    sender = open_connection(loop, here, Recorder())
    send(sender, {}, bytes(LARGE))
    loop.call(sender.close, "gone")
    open_connection(loop, there, owner)
    owner.reason()
    assert owner.frames == []


def test_what_others_queue_while_a_thread_sends_a_large_message_is_not_cut_in_two(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the kernel takes only some of that, and then more."""
    here, there = sockets()
    connection = open_connection(loop, here, Recorder())
    loop.call(lambda: None)  # the preamble is out
    write, writes = connection._write, 0

    def write_hindered(batch: list[Any]) -> int:
        nonlocal writes
        writes += 1
        if writes == 1:
            count = write(batch)
            other = threading.Thread(target=send, args=(connection, {"other": 0}, bytes(100_000)))
            other.start()
            other.join()
            return count
        return write([memoryview(batch[0])[:5]] if writes == 2 else batch)

    monkeypatch.setattr(connection, "_write", write_hindered)
    send(connection, {"large": 0}, b"x" * LARGE)
    flush(loop, connection)
    frames = {next(iter(frame.header)): frame.buffers for frame in read_all(there)}
    assert frames == {"large": [b"x" * LARGE], "other": [bytes(100_000)]}
    assert writes > 2
