"""What a thread cannot write because another one is writing is sent by that one, though nothing follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport.stream import StreamConnection
from rpc.wire.chunking import WHOLE_BYTES
from tests.support.streams import (
    SOON,
    TINY_BUFFER,
    Pair,
    Recorder,
    Sockets,
    headers,
    open_connection,
    read_all,
    send,
)

SIZES = {"small": 10, "whole": WHOLE_BYTES // 2, "in chunks": 2 * WHOLE_BYTES}


class CrowdedLock:
    """A lock before one of whose releases, once, another thread has something to do, and finds it held.

    Args:
        when: whether it is this release.
    """

    def __init__(
        self, lock: threading.Lock, meanwhile: Callable[[], object], when: Callable[[], bool]
    ) -> None:
        self.acquire = lock.acquire
        self._release = lock.release
        self._meanwhile: list[Callable[[], object]] = [meanwhile]
        self._when = when

    def release(self) -> None:
        if self._meanwhile and self._when():
            other = threading.Thread(target=self._meanwhile.pop())
            other.start()
            other.join(SOON)
            assert not other.is_alive()
        self._release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def pair(loop: LoopThread, sockets: Sockets) -> Iterator[Pair]:
    there_loop = LoopThread("other-loop", "a test's")
    made = Pair(loop, sockets(), there_loop)
    loop.call(lambda: None)  # the preamble is out
    yield made
    made.close()
    there_loop.stop()


def crowd(connection: StreamConnection, size: int, when: Callable[[], bool] = lambda: True) -> None:
    """Another thread sends so many bytes while somebody writes: the next one, or when a condition holds."""
    lock = CrowdedLock(
        connection._send_lock, lambda: send(connection, {"by": "another"}, bytes(size), wait=0), when
    )
    connection._send_lock = lock  # type: ignore[assignment]


def senders(pair: Pair) -> list[str]:
    """Of the two frames that arrive."""
    return sorted(header["by"] for header in headers(pair.there_owner.wait_for(2)))


@pytest.mark.parametrize("left", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("written", SIZES.values(), ids=SIZES)
def test_what_is_left_to_a_thread_that_is_writing_is_sent(pair: Pair, written: int, left: int) -> None:
    crowd(pair.here, left)
    send(pair.here, {"by": "one"}, bytes(written))
    assert senders(pair) == ["another", "one"]


@pytest.mark.parametrize("left", SIZES.values(), ids=SIZES)
def test_what_is_left_to_the_loop_while_it_writes_is_sent(
    loop: LoopThread, sockets: Sockets, left: int
) -> None:
    pair = Pair(loop, sockets(buffer_bytes=TINY_BUFFER))

    def stall() -> None:
        send(pair.here, {"by": "one"}, bytes(SIZES["whole"]), wait=0)
        assert pair.here._stalled
        crowd(pair.here, left)

    loop.call(stall)
    assert senders(pair) == ["another", "one"]
    pair.close()


def test_a_large_message_that_waits_goes_out_after_the_next_small_one(pair: Pair) -> None:
    with pair.here._send_lock:  # a third thread is writing
        send(pair.here, {"by": "another"}, bytes(SIZES["in chunks"]))
    send(pair.here, {"by": "one"})
    assert senders(pair) == ["another", "one"]


@pytest.mark.parametrize("left", SIZES.values(), ids=SIZES)
def test_a_close_that_waits_for_the_queue_comes_though_something_is_queued_at_the_last_moment(
    loop: LoopThread, sockets: Sockets, left: int
) -> None:
    here, there = sockets(buffer_bytes=TINY_BUFFER)
    owner = Recorder()
    connection = open_connection(loop, here, owner)

    def leave() -> None:
        send(connection, {"by": "one"}, bytes(SIZES["whole"]), wait=0)
        crowd(connection, left, when=lambda: not connection._queue)
        connection.close("done", flush=True)

    loop.call(leave)
    assert sorted(header["by"] for header in headers(read_all(there))) == ["another", "one"]
    assert owner.reason() == "done"
