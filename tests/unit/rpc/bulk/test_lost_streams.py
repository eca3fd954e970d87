"""A model of two workers whose bulk streams and connection are lost at any moment, and not at the same one.

The ends are real: ``Bulk``, ``StreamReader`` and the reassembly. Between them, the connection is an ordered
queue of frames, of which a session loses none. A stream is an ordered queue of chunks. When it ends, in the
middle of a chunk or between two, the rest is lost. The connection may live on for a while, and ends then.
What has not arrived is sent again, over new streams or the connection. Each seed is one course of events.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest

from rpc.bulk import stream_ends
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.stream_ends import StreamReader
from rpc.bulk.transfer import Transfer
from rpc.transport.base import CLOSED_BY_PEER
from rpc.wire.chunking import SHORT_CHUNK_BYTES, WHOLE_BYTES
from rpc.wire.frames import Kind, chunk_prefix, chunked, open_message
from rpc.wire.reassembly import Reassembly, allocate
from tests.support.effort import examples
from tests.unit.rpc.bulk.test_stream_ends import Watching
from tests.unit.rpc.bulk.wired import LIMIT, End

SEEDS: Final = examples(150)
TAGS: Final = (3, 4)
STREAMS: Final = 2
SIZES: Final = (100, 70_000, WHOLE_BYTES + 8, 3 * SHORT_CHUNK_BYTES, 5 * SHORT_CHUNK_BYTES + 24)
"""Multiples of 4 bytes: elements are."""
INITIAL: Final = 1_000_000


class Chunks:
    """The receiving end of a stream: what has been let through."""

    descriptor = -1

    def __init__(self) -> None:
        self.data = memoryview(b"")

    def receive(self, view: memoryview) -> int:
        count = min(len(view), len(self.data))
        if not count:
            raise ConnectionError(CLOSED_BY_PEER)
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


class StreamedEnd(End):
    """A worker that sends large messages by streams.

    Attributes:
        streams: the chunks on each, on their way from this end.
        readers: read those from the other end, with the sockets.
    """

    def __init__(self, name: str, number: int, chance: random.Random) -> None:
        super().__init__(name, number)
        self.chance = chance
        self.uses_streams = True
        self.numbers = iter(range(1, 1 << 30))
        self.by_connection = self.wire.send
        self.wire.send = self.send  # type: ignore[method-assign]
        self.renew()

    def renew(self) -> None:
        """A new connection, and new streams."""
        self.streams: list[deque[bytes]] = [deque() for _ in range(STREAMS)]
        self.arriving = Reassembly(allocate)
        self.arriving.streams = STREAMS
        self.arriving.find_target = self.decoder.arriving.find_target
        self.readers = [(self._reader(sock), sock) for sock in (Chunks() for _ in range(STREAMS))]

    def _reader(self, sock: Any) -> StreamReader:
        return StreamReader(
            Watching(),
            sock,
            self.arriving,
            opened=lambda number, opening: open_message(
                self.arriving, number, opening, LIMIT, on_stream=True
            ),
            received=self.take_in,
            left=int,
            failed=lambda malformed, reason: None,
            ended=int,
        )

    def send(self, buffers: Sequence[Any], size: int, **options: Any) -> None:
        if not self.uses_streams or size <= WHOLE_BYTES:
            self.by_connection(buffers, size, **options)
            return
        message = chunked(buffers, size, next(self.numbers))
        opening = message.head
        while message.unsent:
            count = min(message.unsent, self.chance.randrange(1, 4) * SHORT_CHUNK_BYTES)
            prefix = chunk_prefix(message.number, message.size - message.unsent, count)
            pieces = [bytes(piece) for piece in message.take(count)]
            place = 0 if opening else self.chance.randrange(STREAMS)
            self.streams[place].append(b"".join((opening, prefix, *pieces)))
            opening = b""

    def read(self, place: int, data: bytes) -> bool:
        """Something comes on a stream; returns false if that is the last, and breaks off."""
        reader, sock = self.readers[place]
        sock.data = memoryview(data)
        try:
            while sock.data:
                reader.read()
        except ConnectionError:
            return False
        return True

    def breaks(self) -> None:
        """The connection is over at this end."""
        self.arriving.clear()
        self.bulk.peer_broke(self.peer)


def numbers(index: int, size: int) -> np.ndarray:
    """The content of a message, which no other has."""
    return (np.arange(size // 4) % 100 + 1000 * (index + 1)).astype(np.int32)


class Posted:
    """A buffer and its transfer."""

    def __init__(self, bulk: Bulk, peer: Any, tag: int, size: int, *, merges: bool) -> None:
        self.memory = np.full(size // 4, INITIAL, np.int32)
        self.base = INITIAL if merges else 0
        self.untouched: np.ndarray | None = None
        """What was there when it was cancelled."""
        merge = self._merge if merges else None
        self.transfer: Transfer = bulk.post(peer, tag, self.memory, merge=merge)

    def _merge(self, begin: int, data: memoryview) -> None:
        part = np.frombuffer(data, np.int32)
        self.memory[begin // 4 : begin // 4 + len(part)] += part

    def cancel(self) -> None:
        if self.transfer.cancel():
            self.untouched = self.memory.copy()

    def index(self) -> int:
        """Which message has filled it, or was merged into it: as a whole, and once."""
        content = self.memory - self.base
        index = int(content[0]) // 1000 - 1
        assert (content == numbers(index, 4 * len(content))).all()
        return index


class Course:
    """One course of events; messages go from ``left`` to ``right``."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.left = StreamedEnd("right", 2, self.chance)
        self.right = StreamedEnd("left", 1, self.chance)
        self.size = {tag: self.chance.choice(SIZES) for tag in TAGS}
        self.sent: dict[int, list[Transfer]] = {tag: [] for tag in TAGS}
        self.memory: list[np.ndarray] = []
        self.posted: dict[int, list[Posted]] = {tag: [] for tag in TAGS}
        self.cut: set[int] = set()
        """The streams that have ended, of this connection."""

    def run(self, events: int) -> None:
        actions = [self.send] * 4 + [self.post] * 4 + [self.stream] * 12 + [self.frame] * 8
        actions += [self.cancel, self.cut_a_stream, self.reconnect]
        for _ in range(events):
            self.chance.choice(actions)()
        self.settle()

    def send(self) -> None:
        tag = self.chance.choice(TAGS)
        data = numbers(len(self.sent[tag]), self.size[tag])
        self.memory.append(data)
        self.sent[tag].append(self.left.bulk.send(self.left.peer, tag, data))

    def post(self) -> None:
        tag = self.chance.choice(TAGS)
        merges = self.chance.random() < 0.6
        self.posted[tag].append(Posted(self.right.bulk, self.right.peer, tag, self.size[tag], merges=merges))

    def cancel(self) -> None:
        under_way = [each for posts in self.posted.values() for each in posts if not each.transfer.done()]
        if under_way:
            self.chance.choice(under_way).cancel()

    def stream(self) -> None:
        """The next chunk of a stream arrives."""
        place = self.chance.randrange(STREAMS)
        if place in self.cut or not self.left.streams[place]:
            return
        if not self._is_open(self.left.streams[place][0]):
            return  # the thread that reads it would wait for the opening on the other stream
        assert self.right.read(place, self.left.streams[place].popleft())

    def _is_open(self, data: bytes) -> bool:
        kind, number = data[24], int.from_bytes(data[8:16], "little")
        return kind == Kind.OPENING or number in self.right.arriving.open_messages

    def frame(self) -> None:
        """The next frame arrives on the connection, in one of the directions."""
        sender, receiver = self.chance.choice([(self.left, self.right), (self.right, self.left)])
        if sender.wire.under_way:
            receiver.receive(sender.wire.under_way.pop(0))

    def cut_a_stream(self) -> None:
        """A stream ends, in the middle of a chunk as a rule, while the connection lives on."""
        place = self.chance.randrange(STREAMS)
        if place in self.cut:
            return
        self.cut.add(place)
        waiting = self.left.streams[place]
        if waiting and self._is_open(waiting[0]):
            data = waiting.popleft()
            self.right.read(place, data[: self.chance.randrange(len(data))])
        waiting.clear()

    def reconnect(self) -> None:
        """The connection ends with all streams, at one end before the other; another one is made."""
        self.cut_a_stream()
        ends = [self.left, self.right]
        self.chance.shuffle(ends)
        for end in ends:
            end.breaks()
            for _ in range(self.chance.randrange(3)):
                self.frame()
        for sender, receiver in ((self.left, self.right), (self.right, self.left)):
            while sender.wire.under_way:  # the session brings what the connection had
                receiver.receive(sender.wire.under_way.pop(0))
        self.left.renew()
        self.right.renew()
        self.cut.clear()
        self.left.uses_streams = self.chance.random() < 0.7
        for tag in TAGS:
            for sequence, transfer in enumerate(self.sent[tag]):
                if not transfer.done():  # nothing is done for one that has not been sent
                    self.left.bulk.send_again((self.left.peer, (tag << 32) + sequence))
        self.left.uses_streams = True

    def settle(self) -> None:
        """Everything arrives, and there is a buffer for every message."""
        for tag in TAGS:
            while len(self.posted[tag]) < 2 * len(self.sent[tag]) + 1:
                self.post()
        self.reconnect()
        while any(self.left.streams) or self.left.wire.under_way or self.right.wire.under_way:
            self.stream()
            self.frame()

    def check(self) -> None:
        for tag in TAGS:
            assert all(each.done() and each.error() is None for each in self.sent[tag])
            found: list[int] = []
            cancelled = 0
            for each in self.posted[tag]:
                if each.untouched is not None:
                    cancelled += 1
                    assert (each.memory == each.untouched).all()
                elif each.transfer.done():
                    assert each.transfer.error() is None
                    found.append(each.index())
                else:
                    assert (each.memory == INITIAL).all()
            assert found == sorted(set(found)), "in order, and each once"
            assert len(self.sent[tag]) - cancelled <= len(found) <= len(self.sent[tag])
        assert not self.left.lost
        assert not self.right.lost


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS // 5))
def test_each_message_counts_once_whatever_is_lost_and_when(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_ends, "MERGED_BYTES", 100_000)
    for seed in range(first, first + SEEDS // 5):
        course = Course(seed)
        try:
            course.run(60)
            course.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
