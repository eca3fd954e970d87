"""Messages that are merged into memory: each byte once, and not at all once the memory is taken back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.wire.chunking import SHORT_CHUNK_BYTES
from rpc.wire.reassembly import Reassembly, Room, allocate
from rpc.wire.targets import Merger, MergingTarget, Target
from tests.support.effort import PROFILE, examples
from tests.support.streams import until

SIZE = 60
SOON = 20.0


def adds_to(memory: np.ndarray) -> Merger:
    def add(begin: int, data: memoryview) -> None:
        memory[begin : begin + len(data)] += np.frombuffer(data, np.uint8)

    return Merger(add)


@settings(PROFILE, max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8))
def test_each_byte_is_merged_once_however_often_it_arrives(parts: list[tuple[int, int]]) -> None:
    message = np.arange(SIZE, dtype=np.uint8)
    memory = np.full(SIZE, 100, np.uint8)
    merger = adds_to(memory)
    arrived = np.zeros(SIZE, bool)
    for begin, end in parts:
        merger.take(begin, message[begin:end].data)
        arrived[begin:end] = True
    assert (memory == np.where(arrived, message + 100, 100)).all()
    merger.take(0, message.data)
    assert (memory == message + 100).all()
    assert merger.error is None


def test_an_error_of_the_merging_is_kept_and_nothing_more_is_merged() -> None:
    begun: list[int] = []

    def fail(begin: int, data: memoryview) -> None:
        begun.append(begin)
        raise MemoryError("none left")

    merger = Merger(fail)
    merger.take(0, memoryview(bytes(10)))
    merger.take(10, memoryview(bytes(10)))
    assert isinstance(merger.error, MemoryError)
    assert begun == [0]


def test_memory_that_is_taken_back_in_the_middle_of_a_part_is_not_touched_afterwards() -> None:
    merging, may_go_on = threading.Event(), threading.Event()
    memory = np.zeros(20, np.uint8)

    def add(begin: int, data: memoryview) -> None:
        merging.set()
        assert may_go_on.wait(SOON)
        memory[begin : begin + len(data)] += 1

    target = MergingTarget([memory.data], Merger(add))
    assert target.begin([])
    reader = threading.Thread(target=target.merge, args=(0, memoryview(bytes(10))))
    reader.start()
    assert merging.wait(SOON)
    taker = threading.Thread(target=target.take_back)
    taker.start()
    may_go_on.set()
    taker.join(SOON)
    assert (memory[:10] == 1).all()  # the part was merged as a whole
    target.merge(10, memoryview(bytes(10)))
    assert (memory[10:] == 0).all()
    reader.join(SOON)


@pytest.mark.parametrize("_", range(10))
def test_two_threads_take_memory_back_while_a_third_one_waits_to_write_to_it(_: int) -> None:
    """As when a collective is out of time while the loop learns that another rank has given it up."""
    target, writing, may_leave = Target([]), threading.Event(), threading.Event()

    def write() -> None:
        target.enter()
        writing.set()
        may_leave.wait(SOON)
        target.leave()

    def waiting() -> int:
        return len(target._changed._waiters)  # type: ignore[attr-defined]

    target.enter()
    threads = [threading.Thread(target=run) for run in (target.take_back, write, target.take_back)]
    for count, each in enumerate(threads, 1):
        each.start()
        until(lambda count=count: waiting() == count)  # type: ignore[misc]
    target.leave()
    assert writing.wait(SOON)
    may_leave.set()
    for each in threads:
        each.join(SOON)
        assert not each.is_alive()


def test_chunks_of_a_message_that_streams_merge_are_refused_on_the_connection() -> None:
    size = 2 * SHORT_CHUNK_BYTES
    arriving = Reassembly(allocate)
    target = MergingTarget([memoryview(bytearray(size - 8))], Merger(lambda begin, data: None))
    arriving.open(1, "it", [Room(1, 8), Room(size - 8, size - 8)], target=target)
    with pytest.raises(ProtocolError, match="on the connection"):
        arriving.begin(1, 0, SHORT_CHUNK_BYTES)
    assert arriving.begin(1, 0, SHORT_CHUNK_BYTES, on_stream=True).merging is target
