"""The two ends of bulk streams, over sockets: what arrives where, and how threads end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

import numpy as np
import pytest

from rpc.bulk.stream_ends import LEAVING, BulkQueue, StreamReader
from rpc.transport.bulk_socket import BulkSocket, bulk_socket
from rpc.wire.frames import PREFIX_BYTES, Frame, Kind, LargeFrame, chunk_prefix, chunked, encode, open_message
from rpc.wire.reassembly import MAX_OPEN, Reassembly, allocate
from rpc.wire.targets import Merger, MergingTarget, Target
from tests.support.frames import prefix
from tests.support.streams import until

MIB: Final = 1 << 20
SOON: Final = 20.0
LIMIT: Final = 1 << 30


def numbers(size: int, first: int = 0) -> np.ndarray:
    """Bytes that tell where they belong."""
    return ((np.arange(size) + first) % 251).astype(np.uint8)


class Loop:
    """A loop that always finds something to read."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        callback(*args)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        callback(*args)

    def remove_reader(self, fd: int) -> bool:
        return True

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        raise AssertionError("nothing waits here")


class Watching(Loop):
    """A loop that finds something to read when a test says so."""

    def __init__(self) -> None:
        self.watched = threading.Event()
        self.callback: Callable[[], object] = int
        self.fd = -1

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self.fd, self.callback = fd, callback
        self.watched.set()

    def find(self) -> None:
        """Wait until there is something to read, and report it."""
        assert select.select([self.fd], [], [], SOON)[0]
        self.callback()


class NonBlocking(Loop):
    """A loop that makes what it watches non-blocking, as uvloop does."""

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        os.set_blocking(fd, False)
        callback(*args)


class Receiver:
    """The receiving ends of some streams, and what has come of them."""

    def __init__(self, socks: list[socket.socket], loop: Loop | None = None, limit: int = LIMIT) -> None:
        self.arriving = Reassembly(allocate)
        self.arriving.streams = len(socks)
        self.frames: list[Frame] = []
        self.failures: list[tuple[bool, str]] = []
        self.failed = threading.Event()
        self.left = threading.Semaphore(0)
        self._came = threading.Condition()
        self._socks = socks
        self.readers = [
            StreamReader(
                loop or Loop(),
                bulk_socket(sock),
                self.arriving,
                opened=lambda number, opening: open_message(
                    self.arriving, number, opening, limit, on_stream=True
                ),
                received=self._received,
                left=self.left.release,
                failed=self._failed,
                ended=int,
            )
            for sock in socks
        ]
        for reader in self.readers:
            reader.watch()

    def _received(self, frame: LargeFrame) -> None:
        with self._came:
            self.frames.append(frame)
            self._came.notify_all()

    def _failed(self, malformed: bool, reason: str) -> None:
        """Hangs up, as the owner of the streams does."""
        self.failures.append((malformed, reason))
        self.failed.set()
        for each in self._socks:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def wait_for(self, count: int) -> list[Frame]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.frames) >= count, SOON)
        return self.frames

    def open(self, opening: bytes) -> None:
        """An opening has come on the connection."""
        number = int.from_bytes(opening[8:16], "little")
        open_message(self.arriving, number, memoryview(opening)[PREFIX_BYTES:], LIMIT)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        until(lambda: not any(reader.is_running for reader in self.readers))


@contextlib.contextmanager
def streams(count: int = 1, loop: Loop | None = None, limit: int = LIMIT) -> Iterator[tuple[Any, Receiver]]:
    """The sockets of the sending ends, and the receiver."""
    pairs = [socket.socketpair() for _ in range(count)]
    receiver = Receiver([pair[1] for pair in pairs], loop, limit)
    try:
        yield [pair[0] for pair in pairs], receiver
    finally:
        receiver.close()
        for pair in pairs:
            pair[0].close()


@contextlib.contextmanager
def queue(
    socks: list[socket.socket], open_first: Callable[[bytes], object] = int, **given: Any
) -> Iterator[Any]:
    """The sending ends; ``failures`` of the queue has what has failed."""
    failures: list[str] = []
    options: dict[str, Any] = {"max_bytes": LIMIT, "queue_limit": LIMIT} | given
    made = BulkQueue(
        [bulk_socket(sock) for sock in socks],
        **options,
        failed=failures.append,
        open_first=open_first,
        ended=int,
    )
    made.failures = failures  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        made.close()
        until(lambda: not made.threads)


def message(number: int, data: np.ndarray, kind: int = Kind.BULK) -> Any:
    pieces, size = encode(kind, number, {}, [b"first", data.data])
    return chunked(pieces, size, number)


def begun(number: int, data: np.ndarray, length: int) -> bytes:
    """What a stream says first: an opening, and the prefix of a chunk of ``length`` bytes."""
    whole = message(number, data)
    return bytes(whole.head) + chunk_prefix(number, 0, length)


# ---- messages arrive


def test_a_chunk_waits_for_the_opening_that_comes_on_the_connection() -> None:
    late: list[bytes] = []
    with streams() as (socks, receiver), queue(socks, late.append) as sender:
        sender.add(message(1, numbers(MIB), Kind.CALL))
        until(lambda: late)
        assert receiver.frames == []
        receiver.open(late[0])
        assert receiver.wait_for(1)[0].kind == Kind.CALL


def merger_of(memory: np.ndarray) -> Merger:
    def add(begin: int, data: memoryview) -> None:
        memory[begin : begin + len(data)] += np.frombuffer(data, np.uint8)

    return Merger(add)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_merged_is_merged_while_it_arrives(count: int) -> None:
    size = 17 * MIB + 1000
    memory = np.full(size, 3, np.uint8)
    with streams(count) as (socks, receiver), queue(socks) as sender:
        target = MergingTarget([memory.data], merger_of(memory))
        receiver.arriving.find_target = lambda kind, call_id, sizes: target
        sender.add(message(1, numbers(size)))
        (frame,) = receiver.wait_for(1)
        assert (memory == numbers(size) + 3).all()
        assert target.is_of(frame.buffers)


@pytest.mark.parametrize("place", [1, MIB + 5])
def test_a_message_that_is_merged_and_sent_again_counts_once(place: int) -> None:
    size = 3 * MIB + 500
    memory = np.full(size, 3, np.uint8)
    merger = merger_of(memory)
    whole = message(1, numbers(size))
    body = b"".join(bytes(piece) for piece in whole.take(whole.size))
    with streams() as (socks, receiver):
        first = MergingTarget([memory.data], merger)
        receiver.arriving.find_target = lambda kind, call_id, sizes: first
        socks[0].sendall(begun(1, numbers(size), len(body)) + body[:place])
        if place > MIB:
            until(lambda: memory[MIB // 2 - 100] != 3)
        receiver.arriving.clear()
        first.take_back()
        before = memory.copy()
        with contextlib.suppress(OSError):
            socks[0].sendall(body[place:])
        assert (memory == before).all()
    with streams() as (socks, receiver), queue(socks) as sender:
        receiver.arriving.find_target = lambda kind, call_id, sizes: MergingTarget([memory.data], merger)
        sender.add(message(1, numbers(size)))
        receiver.wait_for(1)
    assert (memory == numbers(size) + 3).all()


# ---- memory that is taken back in the middle


def in_the_middle(sock: socket.socket, receiver: Receiver, memory: np.ndarray, size: int) -> Target:
    """Half a message has been received into ``memory``."""
    target = Target([memory.data])
    receiver.arriving.find_target = lambda kind, call_id, sizes: target
    whole = message(1, numbers(size))
    sock.sendall(begun(1, numbers(size), whole.size))
    body = b"".join(bytes(piece) for piece in whole.take(whole.size))
    sock.sendall(body[: size // 2])
    until(lambda: memory[size // 2 - 100])
    return target


def test_a_buffer_is_taken_back_while_the_sender_stands_still_and_the_rest_goes_elsewhere() -> None:
    size = 2 * MIB
    memory = np.zeros(size, np.uint8)
    with streams() as (socks, receiver):
        target = in_the_middle(socks[0], receiver, memory, size)
        target.take_back()
        memory[:] = 0xEE
        whole = message(1, numbers(size))
        body = b"".join(bytes(piece) for piece in whole.take(whole.size))
        socks[0].sendall(body[size // 2 :])
        (frame,) = receiver.wait_for(1)
        assert (np.frombuffer(frame.buffers[1], np.uint8) == numbers(size)).all()
        assert (memory == 0xEE).all()


def test_when_the_connection_breaks_nothing_is_written_to_the_buffer_any_more() -> None:
    size = 2 * MIB
    memory = np.zeros(size, np.uint8)
    with streams() as (socks, receiver):
        target = in_the_middle(socks[0], receiver, memory, size)
        receiver.arriving.clear()
        target.take_back()
        memory[:] = 0xEE
        with contextlib.suppress(OSError):
            socks[0].send(bytes(1000))
        assert receiver.failed.wait(SOON)
        assert (memory == 0xEE).all()
        assert receiver.frames == []


def test_a_thread_sleeps_until_the_rest_of_a_message_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    receive = BulkSocket.receive

    def timed(sock: BulkSocket, view: memoryview) -> int:
        begin = monotonic()
        count = receive(sock, view)
        if not count:
            waits.append(monotonic() - begin)
        return count

    monkeypatch.setattr(BulkSocket, "receive", timed)
    size = 2 * MIB
    with streams(loop=NonBlocking()) as (socks, receiver):
        in_the_middle(socks[0], receiver, np.zeros(size, np.uint8), size)
        until(lambda: len(waits) >= 3)
    assert min(waits[:3]) > 1e-3  # a look that does not wait takes some microseconds


# ---- what a peer may not do


def opening(number: int, length: int) -> bytes:
    inner = prefix(length, segments=1)
    return prefix(len(inner), call_id=number, kind=Kind.OPENING) + inner


HOSTILE: Final = {
    "a call": (prefix(0, kind=Kind.CALL), "a frame of kind 5 on a stream"),
    "noise": (b"\xff" * 100, "a frame of kind 255"),
    "an opening without end": (prefix(1 << 40, kind=Kind.OPENING), "an opening of"),
    "too many messages": (b"".join(opening(n, MIB) for n in range(2 * MAX_OPEN + 1)), "messages are open"),
    "a chunk at another place": (opening(1, MIB) + chunk_prefix(1, 7, 100), "no chunk of 100 bytes"),
    "a chunk that comes twice": (
        opening(1, 2 * MIB) + chunk_prefix(1, 0, MIB) + bytes(MIB) + chunk_prefix(1, 0, MIB),
        "has come twice",
    ),
    "a farewell with more in it": (LEAVING[:-1] + b"\1", "a frame of kind"),
}


@pytest.mark.parametrize(("said", "complaint"), HOSTILE.values(), ids=HOSTILE)
def test_what_no_stream_may_bring_is_a_breach_of_the_protocol(said: bytes, complaint: str) -> None:
    with streams() as (socks, receiver):
        with contextlib.suppress(OSError):
            socks[0].sendall(said)
        assert receiver.failed.wait(SOON)
        ((malformed, reason),) = receiver.failures
        assert malformed
        assert complaint in reason
        assert receiver.frames == []


def test_a_chunk_of_a_message_that_is_never_opened_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.wire.reassembly._OPENING_SECONDS", 0.01)
    with streams() as (socks, receiver):
        socks[0].sendall(chunk_prefix(9, 0, 100))
        assert receiver.failed.wait(SOON)
        assert receiver.failures == [(True, "a chunk belongs to message 9, which is not open")]


# ---- threads


def test_a_thread_that_writes_to_a_peer_which_reads_nothing_can_be_ended() -> None:
    here, there = socket.socketpair()
    with queue([here]) as sender:
        sender.add(message(1, numbers(20 * MIB)))
        until(lambda: sender.threads == 1)
        sender.close()
        until(lambda: not sender.threads)
        assert sender.failures == []
        assert not sender.add(message(2, numbers(MIB)))
    there.close()


def test_callers_wait_while_too_much_is_to_be_sent() -> None:
    pair = socket.socketpair()
    with queue([pair[0]], queue_limit=10 * MIB) as sender:
        assert not sender.is_full()
        sender.add(message(1, numbers(20 * MIB)))
        assert sender.is_full()
        assert not sender.wait_for_room(0.0)
        receiver = Receiver([pair[1]])
        assert sender.wait_for_room(float("inf"))
        receiver.close()


def test_no_more_is_open_at_a_time_than_the_peer_accepts() -> None:
    limit = 6 * MIB
    with streams(3, limit=limit) as (socks, receiver):
        receiver.arriving.streams = 0  # no leeway
        with queue(socks[:1], max_bytes=limit) as sender:
            for number in range(8):
                sender.add(message(number, numbers(4 * MIB)))
            receiver.wait_for(8)
            assert receiver.failures == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_sender_that_leaves_says_so_behind_all_messages(count: int) -> None:
    with streams(count) as (socks, receiver), queue(socks) as sender:
        for number in range(3):
            sender.add(message(number, numbers(9 * MIB)))
        sender.leave()
        assert not sender.add(message(9, numbers(MIB)))
        for _ in range(count):
            assert receiver.left.acquire(timeout=SOON)
        assert len(receiver.frames) == 3
        until(lambda: not sender.threads)


def test_the_end_of_a_stream_is_told_by_the_thread_that_writes() -> None:
    here, there = socket.socketpair()
    with queue([here]) as sender:
        there.close()
        sender.add(message(1, numbers(20 * MIB)))
        until(lambda: sender.failures)
        assert len(sender.failures) == 1
