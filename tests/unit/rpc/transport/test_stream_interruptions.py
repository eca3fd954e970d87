"""A stream connection in the middle of whose work something happens: a close, a finalizer, Ctrl-C, a fork."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport import ConnectionClosed, sending, syscalls
from rpc.transport.stream import StreamConnection
from tests.support.streams import (
    SOON,
    TINY_BUFFER,
    Pair,
    Recorder,
    Sockets,
    frame_bytes,
    headers,
    open_connection,
    send,
    skip_preamble,
)

# ---- a descriptor number never belongs to somebody else while we write


@contextlib.contextmanager
def users_file(path: Path, number: int) -> Iterator[None]:
    """A file of the user's that got that descriptor number."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    yield
    os.close(number)


class HeldLock:
    """A lock whose next ``acquire`` waits, as a thread does that is switched off right before it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if threading.current_thread().name == "writer":
            self.arrived.set()
            self.go_on.wait(SOON)
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_a_thread_that_was_about_to_write_does_not_write_to_a_closed_descriptor(
    loop: LoopThread, sockets: Sockets, tmp_path: Path, size: int
) -> None:
    here, _ = sockets()
    connection = open_connection(loop, here, Recorder())
    connection._send_lock = lock = HeldLock(connection._send_lock)  # type: ignore[assignment]
    writer = threading.Thread(target=send, args=(connection, {}, b"x" * size), name="writer")
    writer.start()
    assert lock.arrived.wait(SOON)
    number = connection._descriptor
    loop.call(connection.close, "closed under its hands")
    with users_file(tmp_path / "file", number):
        lock.go_on.set()
        writer.join(SOON)
        assert not writer.is_alive()
    assert (tmp_path / "file").read_bytes() == b""


def test_closing_waits_for_a_thread_that_is_writing(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = sockets()
    owner = Recorder()
    connection = open_connection(loop, here, owner)
    skip_preamble(there)
    writing, go_on = threading.Event(), threading.Event()
    send_noting = syscalls.send_noting

    def slow(descriptor: int, data: bytes, counts: list[int]) -> None:
        writing.set()
        go_on.wait(SOON)
        send_noting(descriptor, data, counts)

    monkeypatch.setattr(syscalls, "send_noting", slow)
    writer = threading.Thread(target=send, args=(connection, {"index": 0}))
    writer.start()
    assert writing.wait(SOON)
    loop.loop.call_soon_threadsafe(connection.close, "closed")
    assert not owner.lost.wait(0.02)
    assert os.fstat(connection._descriptor)
    go_on.set()
    assert owner.reason() == "closed"
    writer.join(SOON)
    assert there.recv(1000) == frame_bytes({"index": 0})


def test_closing_under_fire_writes_nothing_to_files_that_get_the_number(
    loop: LoopThread, sockets: Sockets, tmp_path: Path
) -> None:
    for attempt in range(5):
        here, there = sockets()
        connection = open_connection(loop, here, Recorder(), send_queue_bytes=200_000)
        number = connection._descriptor
        enough = threading.Event()

        def fire(connection: StreamConnection = connection, enough: threading.Event = enough) -> None:
            with contextlib.suppress(ConnectionClosed):
                while True:
                    send(connection, {}, b"x" * 500, wait=False)
                    send(connection, {}, b"x" * 70_000)
                    enough.set()

        writers = [threading.Thread(target=fire) for _ in range(3)]
        for writer in writers:
            writer.start()
        assert enough.wait(SOON)
        loop.call(connection.close, "closed")
        path = tmp_path / f"file{attempt}"
        with users_file(path, number):
            for writer in writers:
                writer.join(SOON)
                assert not writer.is_alive()
        assert path.read_bytes() == b""
        there.close()


# ---- finalizers and Ctrl-C in the middle of a send


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_finalizer_may_send_while_its_thread_is_sending(
    loop: LoopThread, sockets: Sockets, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(loop, sockets(buffer_bytes=TINY_BUFFER))
    finalizers = deque([lambda: send(pair.here, {"from": "finalizer"}, b"x" * size)])

    def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if finalizers:
                finalizers.pop()()
            return function(*args)

        return call

    monkeypatch.setattr(syscalls, "send_noting", collecting(syscalls.send_noting))
    monkeypatch.setattr(pair.here, "_write", collecting(pair.here._write))
    send(pair.here, {"from": "thread"}, b"x" * size)
    assert headers(pair.there_owner.wait_for(2)) == [{"from": "thread"}, {"from": "finalizer"}]
    pair.close()


def test_a_finalizer_may_send_while_its_thread_is_queueing(loop: LoopThread, sockets: Sockets) -> None:
    class CollectingQueue(deque[Any]):
        def extend(self, pieces: Iterable[Any]) -> None:
            if finalizers:
                finalizers.pop()()
            super().extend(pieces)

    pair = Pair(loop, sockets(buffer_bytes=TINY_BUFFER))
    finalizers = [lambda: send(pair.here, {"from": "finalizer"})]
    with pair.here._send_lock:  # another thread is writing: what comes now is queued
        pair.here._queue = CollectingQueue()
        send(pair.here, {"from": "thread"}, b"x" * 1000)
    pair.here._drain()
    assert sorted(header["from"] for header in headers(pair.there_owner.wait_for(2))) == [
        "finalizer",
        "thread",
    ]
    pair.close()


def interrupt_once(function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """The function, hit by Ctrl-C right before or after its first call: there Python looks for signals."""
    interruptions = [after]

    def call(*args: Any, **options: Any) -> Any:
        result = None if interruptions == [False] else function(*args, **options)
        if interruptions:
            interruptions.clear()
            raise KeyboardInterrupt
        return result

    return call


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_ctrl_c_right_after_the_send_lock_was_acquired_leaves_the_connection_usable(
    loop: LoopThread, sockets: Sockets, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_LOCK_SECONDS", 0.01)
    pair = Pair(loop, sockets())

    class Lock(HeldLock):
        acquire = staticmethod(interrupt_once(pair.here._send_lock.acquire, after=True))

    pair.here._send_lock = Lock(pair.here._send_lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        send(pair.here, {"index": 0}, b"x" * size)
    send(pair.here, {"index": 1}, b"x" * size)
    assert headers(pair.there_owner.wait_for(1)) == [{"index": 1}]
    pair.close()


@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_right_before_or_after_a_small_frame_is_written_leaves_the_connection_usable(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    pair = Pair(loop, sockets())
    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "send_noting", interrupt_once(syscalls.send_noting, after=after))
        with pytest.raises(KeyboardInterrupt):
            send(pair.here, {"index": 0})
    send(pair.here, {"index": 1})
    assert headers(pair.there_owner.wait_for(2)) == [{"index": 0}, {"index": 1}]
    pair.close()


@pytest.mark.parametrize("part", [None, 20, 500, 5000])
def test_ctrl_c_right_after_some_of_the_queue_was_written_leaves_the_connection_usable(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch, part: int | None
) -> None:
    pair = Pair(loop, sockets())
    send_noting = syscalls.send_noting

    def send_part(descriptor: int, data: bytes, counts: list[int]) -> None:
        if part is not None:  # else Ctrl-C comes right before
            send_noting(descriptor, data[:part], counts)
        raise KeyboardInterrupt

    with pair.here._send_lock:  # another thread is writing: what comes now is queued
        for index in range(10):
            send(pair.here, {"index": index}, b"x" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "send_noting", send_part)
        with contextlib.suppress(KeyboardInterrupt), pair.here._send_lock:
            pair.here._write_queue(1 << 20)
    assert pair.here._in_doubt
    pair.here.flush()
    send(pair.here, {"index": 10})
    assert headers(pair.there_owner.wait_for(11)) == [{"index": index} for index in range(11)]
    assert not pair.here._queued_bytes
    pair.close()


def test_ctrl_c_right_after_part_of_a_small_frame_was_written_breaks_the_connection(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(loop, sockets())
    send_noting = syscalls.send_noting

    def send_part(descriptor: int, data: bytes, counts: list[int]) -> None:
        send_noting(descriptor, data[:20], counts)
        raise KeyboardInterrupt

    monkeypatch.setattr(syscalls, "send_noting", send_part)
    with pytest.raises(KeyboardInterrupt):
        send(pair.here, {"index": 0})
    assert pair.here_owner.reason() == "the connection broke: a thread was interrupted while it was writing"
    assert pair.there_owner.frames == []


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_ctrl_c_right_after_a_write_breaks_the_connection_rather_than_a_frame(
    loop: LoopThread, sockets: Sockets, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(loop, sockets(buffer_bytes=TINY_BUFFER))
    monkeypatch.setattr(pair.here, "_write", interrupt_once(pair.here._write, after=True))
    with pytest.raises(KeyboardInterrupt):
        send(pair.here, {"index": 0}, b"x" * size)
    assert pair.here_owner.reason() == "the connection broke: a thread was interrupted while it was writing"
    assert pair.there_owner.reason() == "the connection was closed by the other side"
    assert pair.there_owner.frames == []
    with pytest.raises(ConnectionClosed):
        send(pair.here, {"index": 1})


def test_ctrl_c_while_queueing_loses_no_other_frame(
    loop: LoopThread, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(loop, sockets())
    monkeypatch.setattr(pair.here, "_send_now", lambda frame: False)
    monkeypatch.setattr(pair.here, "_drain", interrupt_once(pair.here._drain, after=False))
    with pytest.raises(KeyboardInterrupt):
        send(pair.here, {"index": 0})
    assert headers(pair.there_owner.wait_for(1)) == [{"index": 0}]
    pair.close()


# ---- fork


def test_a_forked_child_lets_go_and_the_parent_goes_on(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets()
    connection = open_connection(loop, here, Recorder())
    skip_preamble(there)
    told, tell = os.pipe()
    wait, release = os.pipe()
    child = os.fork()
    if not child:
        os.close(release)
        connection.abandon()
        connection.abandon()
        try:
            send(connection, {"from": "child"})
        except ConnectionClosed:
            os.write(tell, b"refused")
        os.read(wait, 1)  # lives on until the parent closes its end
        os._exit(0)
    assert os.read(told, 100) == b"refused"
    send(connection, {"from": "parent"})
    assert there.recv(1000) == frame_bytes({"from": "parent"})
    loop.call(connection.close, "done")
    assert there.recv(1) == b""  # the child does not keep the connection open
    os.close(release)
    os.waitpid(child, 0)
    for descriptor in (told, tell, wait):
        os.close(descriptor)
