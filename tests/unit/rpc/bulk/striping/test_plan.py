"""Messages over stripes: they arrive whole in whatever order their chunks come; no peer may do otherwise."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpc.bulk.striping import plan
from rpc.bulk.striping.plan import CHUNK_BYTES, HEADER_BYTES, MAX_PARKED, Arrivals, Outgoing, unpack_header
from rpc.errors import ProtocolError
from rpc.wire.chunking import MAX_SEGMENTS, Room
from rpc.wire.decoder import read_opening
from rpc.wire.frames import encode

PROFILE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SMALL_CHUNK = 64


def allocate(length: int) -> memoryview:
    """Memory that nobody has cleared: what is not written to is seen."""
    return memoryview(bytearray([0xA5]) * length)


class Network:
    """A sender, a receiver, and between them a connection for openings and stripes for chunks.

    What moves next is drawn; on each stripe, and on the connection, nothing overtakes anything.
    """

    def __init__(self, stripes: int, max_bytes: int, seed: int) -> None:
        self.outgoing = Outgoing(max_bytes)
        self.arrivals = Arrivals(max_bytes, allocate)
        self.arrived: list[tuple[int, list[bytes]]] = []
        self._max_bytes = max_bytes
        self._openings: deque[tuple[int, bytes]] = deque()
        self._stripes: list[deque[bytes]] = [deque() for _ in range(stripes)]
        self._random = random.Random(seed)

    def send(self, call_id: int, segments: list[bytes]) -> None:
        self.outgoing.add(*encode(5, call_id, {}, segments))

    def run(self) -> None:
        """Until nothing moves any more."""
        moves = [self._send_chunk, self._deliver_opening, self._deliver_chunk]
        idle = 0
        while idle < 50 * len(self._stripes):
            idle = 0 if self._random.choice(moves)() else idle + 1

    def _send_chunk(self) -> bool:
        chunk = self.outgoing.next()
        if chunk is None:
            return False
        if chunk.opening is not None:
            self._openings.append(chunk.opening)
        self._random.choice(self._stripes).append(b"".join(chunk.pieces))
        return True

    def _deliver_opening(self) -> bool:
        if not self._openings:
            return False
        number, opening = self._openings.popleft()
        self.arrivals.open(number, *read_opening(memoryview(opening), self._max_bytes, 0))
        return True

    def _deliver_chunk(self) -> bool:
        stripe = self._random.choice(self._stripes)
        if not stripe:
            return False
        header, data = unpack_header(stripe[0][:HEADER_BYTES]), stripe[0][HEADER_BYTES:]
        parts = self.arrivals.begin(*header)
        if parts is None:
            return False
        stripe.popleft()
        for part in parts:
            part[:], data = data[: len(part)], data[len(part) :]
        assert not data
        complete = self.arrivals.filled(header[0], header[2])
        if complete is not None:
            (_, call_id, _), segments = complete
            self.arrived.append((call_id, [bytes(segment) for segment in segments]))
        return True


@pytest.fixture(scope="module", autouse=True)
def small_numbers() -> Iterator[None]:
    """Limits that small messages reach."""
    with ExitStack() as patches:
        for name, value in (("CHUNK_BYTES", SMALL_CHUNK), ("MAX_OPEN", 3), ("_SENT_AT_ONCE", 3)):
            patches.enter_context(patch.object(plan, name, value))
        yield


lengths = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 128, 300])
segment_lists = st.lists(
    lengths.map(lambda length: random.Random(length).randbytes(length)), min_size=1, max_size=5
).filter(any)


@PROFILE
@given(
    messages=st.lists(segment_lists, max_size=12),
    stripes=st.integers(1, 5),
    max_bytes=st.sampled_from([1800, 3000, 1 << 20]),
    seed=st.integers(0, 1 << 32),
)
def test_messages_arrive_whole_in_whatever_order_chunks_and_openings_come(
    messages: list[list[bytes]], stripes: int, max_bytes: int, seed: int
) -> None:
    network = Network(stripes, max_bytes, seed)
    for call_id, segments in enumerate(messages):
        network.send(call_id, segments)
    network.run()
    assert not network.outgoing
    assert not network.arrivals
    assert sorted(network.arrived) == list(enumerate(messages))


def test_messages_take_turns() -> None:
    outgoing = Outgoing(1 << 20)
    for call_id in range(3):
        outgoing.add(*encode(5, call_id, {}, [bytes(3 * SMALL_CHUNK)]))
    numbers = [unpack_header(chunk.pieces[0])[0] for chunk in iter(outgoing.next, None)]
    assert [sorted(numbers[at : at + 3]) for at in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_each_message_is_opened_once_before_its_first_chunk() -> None:
    outgoing = Outgoing(1 << 20)
    for call_id in range(5):
        outgoing.add(*encode(5, call_id, {}, [bytes(2 * SMALL_CHUNK)]))
    opened: list[int] = []
    for chunk in iter(outgoing.next, None):
        if chunk.opening is not None:
            opened.append(chunk.opening[0])
        assert unpack_header(chunk.pieces[0])[0] in opened
    assert opened == list(range(5))


def test_the_senders_memory_is_not_copied() -> None:
    outgoing = Outgoing(1 << 20)
    memory = bytearray(100)
    outgoing.add(*encode(5, 1, {}, [memoryview(memory)]))
    chunk = outgoing.next()
    assert chunk is not None
    memory[:] = b"x" * 100
    assert chunk.pieces[1] == b"x" * SMALL_CHUNK


def test_what_is_forgotten_is_not_sent() -> None:
    outgoing = Outgoing(1 << 20)
    outgoing.add(*encode(5, 1, {}, [bytes(1000)]))
    outgoing.add(*encode(5, 2, {}, [bytes(1000)]))
    outgoing.next()
    outgoing.clear()
    assert not outgoing
    assert outgoing.next() is None


# ---- what a peer may not do

SIZE = 150
"""Three chunks: 64, 64 and 22 bytes."""


def arrivals(max_bytes: int = 1 << 20) -> Arrivals:
    found = Arrivals(max_bytes, allocate)
    found.open(0, "what", [Room(SIZE, SIZE)])
    return found


BAD_CHUNKS: dict[str, tuple[tuple[int, int, int], str]] = {
    "not where one is cut": ((0, 1, 64), "no chunk of 64 bytes begins at 1 in message 0 of 150 bytes"),
    "in the middle of another": ((0, 96, 54), "no chunk of 54 bytes begins at 96"),
    "too short": ((0, 0, 63), "no chunk of 63 bytes begins at 0"),
    "empty": ((0, 64, 0), "no chunk of 0 bytes"),
    "too long": ((0, 0, 65), "no chunk of 65 bytes"),
    "beyond the end": ((0, 128, 64), "no chunk of 64 bytes begins at 128"),
    "after the end": ((0, 192, 22), "no chunk of 22 bytes begins at 192"),
    "far away": ((0, (1 << 64) - 64, 64), "no chunk of 64 bytes begins at 18446744073709551552"),
    "of a message far ahead": ((1 + MAX_PARKED, 0, 64), "a chunk of message 1025, where 1 is next"),
    "of the last message of all": (((1 << 64) - 1, 0, 64), "a chunk of message 18446744073709551615"),
}


@pytest.mark.parametrize(("chunk", "text"), BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_chunks_are_refused_that_cannot_be(chunk: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        arrivals().begin(*chunk)


@pytest.mark.parametrize("filled", [False, True], ids=["while it arrives", "when it has arrived"])
def test_a_chunk_may_come_once(filled: bool) -> None:
    receiver = arrivals()
    assert receiver.begin(0, 64, 64) is not None
    if filled:
        assert receiver.filled(0, 64) is None
    with pytest.raises(ProtocolError, match="the chunk at 64 of message 0 has come twice"):
        receiver.begin(0, 64, 64)


def test_a_chunk_of_a_message_that_is_complete_is_refused() -> None:
    receiver = arrivals()
    for offset, length in ((128, 22), (0, 64), (64, 64)):
        receiver.begin(0, offset, length)
    assert [receiver.filled(0, length) is None for length in (22, 64, 64)] == [True, True, False]
    with pytest.raises(ProtocolError, match="a chunk of message 0, which is complete"):
        receiver.begin(0, 0, 64)


def test_a_message_is_complete_when_its_chunks_have_arrived_and_not_when_they_have_begun() -> None:
    receiver = arrivals()
    for offset, length in ((0, 64), (64, 64), (128, 22)):
        receiver.begin(0, offset, length)
    assert receiver.filled(0, 64) is None
    assert receiver.filled(0, 22) is None
    assert receiver.filled(0, 64) is not None


def test_a_chunk_waits_until_its_message_is_opened() -> None:
    receiver = arrivals()
    assert receiver.begin(1, 0, 64) is None
    receiver.open(1, "what", [Room(SIZE, SIZE)])
    assert receiver.begin(1, 0, 64) is not None


@pytest.mark.parametrize("number", [0, 2, 1 << 63])
def test_messages_are_opened_in_the_order_of_their_numbers(number: int) -> None:
    with pytest.raises(ProtocolError, match=f"message {number} was opened over stripes, where 1 is next"):
        arrivals().open(number, "what", [Room(SIZE, SIZE)])


def test_a_message_with_nothing_in_it_is_refused() -> None:
    with pytest.raises(ProtocolError, match="has nothing in it"):
        arrivals().open(1, "what", [Room(0, 0)])


def test_no_memory_is_taken_beyond_the_limit_and_no_end_of_messages_waits() -> None:
    taken: list[int] = []

    def note(length: int) -> memoryview:
        taken.append(length)
        return allocate(length)

    receiver = Arrivals(2 * SIZE, note)
    for number in range(2 + MAX_PARKED):
        receiver.open(number, "what", [Room(SIZE, SIZE)])
    assert taken == [SIZE, SIZE]
    assert receiver.begin(2, 0, 64) is None
    with pytest.raises(ProtocolError, match=f"more than {MAX_PARKED} messages over stripes wait"):
        receiver.open(2 + MAX_PARKED, "what", [Room(SIZE, SIZE)])


def test_messages_that_wait_may_not_have_any_number_of_segments() -> None:
    receiver = Arrivals(SIZE, allocate)
    receiver.open(0, "what", [Room(SIZE, SIZE)])
    receiver.open(1, "what", [Room(1, 1)] * (MAX_SEGMENTS - 1))
    with pytest.raises(ProtocolError, match=f"more than {MAX_SEGMENTS} segments"):
        receiver.open(2, "what", [Room(SIZE, SIZE)])
    assert receiver.begin(0, 0, 64) is not None
    for offset in range(64, SIZE, 64):
        receiver.begin(0, offset, min(64, SIZE - offset))
    receiver.filled(0, SIZE)
    receiver.open(2, "what", [Room(SIZE, SIZE)])


def test_chunks_are_large_enough_to_be_worth_a_system_call() -> None:
    """The other tests cut smaller."""
    assert CHUNK_BYTES >= 64 << 10


def describe(segments: list[Any]) -> list[int]:
    return [len(segment) for segment in segments]


def test_segments_of_many_bytes_have_memory_of_their_own() -> None:
    network = Network(2, 1 << 22, 1)
    network.send(1, [b"pickle", bytes(200_000), bytes(10), bytes(300_000)])
    found: list[int] = []

    def note(length: int) -> memoryview:
        found.append(length)
        return allocate(length)

    network.arrivals = Arrivals(1 << 22, note)
    network.run()
    assert describe(network.arrived[0][1]) == [6, 200_000, 10, 300_000]
    assert len(found) == 4
