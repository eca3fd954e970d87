"""A stream connection: whole frames, in order, from any thread, until it ends, and nothing after that."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport.base import ConnectionClosed
from rpc.transport.stream import StreamConnection
from rpc.wire.frames import PREAMBLE
from tests.support.streams import (
    SOON,
    TINY_BUFFER,
    Pair,
    Recorder,
    Sockets,
    frame_bytes,
    headers,
    open_connection,
    read_all,
    reset,
    send,
    skip_preamble,
    until_broken,
)

FAMILIES = ["unix", "tcp"]


def in_threads(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


# ---- order and wholeness


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_of_several_threads_never_interleave_and_each_threads_stay_in_order(
    loop: LoopThread, sockets: Sockets, family: str
) -> None:
    pair = Pair(loop, sockets(family, TINY_BUFFER))
    sizes = [0, 10, 3000, 70_000, 5, 200_000, 1, 65_000, 66_000]  # several times the socket's buffer

    def talk(connection: StreamConnection, thread: int) -> Callable[[], None]:
        def run() -> None:
            for index, size in enumerate(sizes):
                payload = bytearray([(thread * 50 + index) % 256]) * size
                send(connection, {"thread": thread, "index": index}, payload, aliased=index % 2 == 0)

        return run

    in_threads(*(talk(pair.here, thread) for thread in range(4)), talk(pair.there, 4))
    for owner, threads in ((pair.there_owner, range(4)), (pair.here_owner, [4])):
        frames = owner.wait_for(len(threads) * len(sizes))
        for thread in threads:
            mine = [frame for frame in frames if frame.header["thread"] == thread]
            assert [frame.header["index"] for frame in mine] == list(range(len(sizes)))
            for frame, size in zip(mine, sizes, strict=True):
                expected = bytes([(thread * 50 + frame.header["index"]) % 256]) * size
                assert frame.buffers == [expected]
    pair.close()


# ---- the end


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_the_stream_is_told_once_and_does_not_keep_the_poller_spinning(
    loop: LoopThread, sockets: Sockets, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_ups: list[StreamConnection] = []
    readable = StreamConnection._readable

    def noting(connection: StreamConnection) -> bool:
        wake_ups.append(connection)
        return readable(connection)

    monkeypatch.setattr(StreamConnection, "_readable", noting)
    here, there = sockets(family)
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    skip_preamble(there)
    there.sendall(PREAMBLE + frame_bytes({"last": 1}))
    there.close()
    assert owner.reason() == "the connection was closed by the other side"
    assert headers(owner.frames) == [{"last": 1}]
    for _ in range(5):
        loop.call(lambda: None)
    assert len(wake_ups) <= 3
    with pytest.raises(ConnectionClosed, match="the connection to the peer is closed"):
        send(connection, {})


@pytest.mark.parametrize("data", [b"", PREAMBLE + frame_bytes({"last": 1})], ids=["nothing", "data"])
def test_a_reset_is_told_as_one(loop: LoopThread, sockets: Sockets, data: bytes) -> None:
    here, there = sockets("tcp")
    owner = Recorder()
    open_connection(loop, here, owner, over_network=True)
    there.sendall(data)
    reset(there)
    assert owner.reason() == "the connection broke: Connection reset by peer"
    assert headers(owner.frames) == ([{"last": 1}] if data else [])


@pytest.mark.parametrize("size", [10, 60_000], ids=["small", "joined by the kernel"])
def test_a_reset_that_a_writer_is_told_of_first_is_told_as_one(
    loop: LoopThread, sockets: Sockets, size: int
) -> None:
    here, there = sockets("tcp")
    owner = Recorder()
    connection = open_connection(loop, here, owner, over_network=True)

    def write_first() -> None:  # the loop reads when this has ended
        reset(there)
        until_broken(here)
        send(connection, {}, bytes(size))

    loop.call(write_first)
    assert owner.reason() == "the connection broke: Connection reset by peer"


def test_close_with_flush_sends_what_is_queued_first(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=TINY_BUFFER)
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    for index in range(5):
        send(connection, {"index": index}, b"x" * 100_000)
    loop.call(lambda: connection.close("done", flush=True))
    assert not owner.lost.is_set()
    assert headers(read_all(there)) == [{"index": index} for index in range(5)]
    assert owner.reason() == "done"


def test_close_with_flush_closes_at_once_when_nothing_is_queued(loop: LoopThread, sockets: Sockets) -> None:
    here, _ = sockets()
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    loop.call(lambda: connection.close("done", flush=True))
    assert owner.lost.is_set()


def test_close_with_flush_gives_up_when_the_peer_is_gone(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=TINY_BUFFER)
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    send(connection, {}, b"x" * 1_000_000)
    loop.call(lambda: connection.close("done", flush=True))
    there.close()
    assert owner.reason()


def test_within_a_host_who_closes_without_having_read_everything_has_closed(
    loop: LoopThread, sockets: Sockets
) -> None:
    here, there = sockets("unix")
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    send(connection, {}, b"never read")
    there.close()
    assert owner.reason() == "the connection was closed by the other side"


def test_closing_twice_is_told_once(loop: LoopThread, sockets: Sockets) -> None:
    here, _ = sockets()
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    loop.call(connection.close, "first")
    loop.call(connection.close, "second")
    assert owner.reason() == "first"
