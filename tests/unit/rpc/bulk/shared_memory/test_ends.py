"""What a sender and a receiver make of segments, of each other's mistakes, and of the system's refusals."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rpc.bulk.shared_memory.memory import REFUSED, RETIRED, SLOTS, create
from rpc.errors import ProtocolError
from tests.unit.rpc.bulk.shared_memory.ends import MIB, Ends, in_child, open_descriptors

DATA = bytes(range(256)) * 4096


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def number_of(buffers: list[memoryview] | None) -> int:
    """Where buffers lie."""
    assert buffers
    address: int = np.frombuffer(buffers[0], np.uint8).__array_interface__["data"][0]
    return address


def test_buffers_of_one_message_lie_together_each_aligned(ends: Ends) -> None:
    sent = [DATA[:100_001], DATA[7:70_000], DATA[:4_097], DATA[1:200_000]]
    ends.send(*sent)
    buffers = ends.send(*sent)
    assert buffers is not None
    assert [bytes(each) for each in buffers] == sent
    addresses = [number_of([each]) for each in buffers]
    assert all(address % 64 == 0 for address in addresses)
    assert len(ends.pool.segments(1)) == 1


def test_a_segment_is_not_used_again_while_anything_lies_in_it(ends: Ends) -> None:
    ends.send(DATA, DATA)
    buffers = ends.send(DATA, DATA)
    assert buffers is not None
    view = np.frombuffer(buffers[1], np.uint8)[5:6]
    buffers = None
    for _ in range(4):
        ends.send(bytes(MIB), bytes(MIB))
    assert view[0] == 5


def test_it_is_used_again_when_nothing_lies_in_it_any_more(ends: Ends) -> None:
    ends.send(DATA)
    places = set()
    for _ in range(100):
        places.add(number_of(ends.send(DATA)))
    assert len(places) == 1
    assert len(ends.pool.segments(1)) == 1


def test_a_cycle_returns_it_when_it_is_collected(ends: Ends) -> None:
    ends.send(DATA)
    cycle: list[Any] = [ends.send(DATA)]
    cycle.append(cycle)
    gc.disable()
    del cycle
    assert ends.send(DATA) is None
    gc.enable()
    gc.collect()
    ends.outgoing.note_returns(0.0)
    assert not any(segment.lent for segment in ends.pool.segments(1))


def test_a_message_that_was_perhaps_not_sent_takes_its_segment_along(ends: Ends) -> None:
    ends.send(DATA)
    loan = ends.outgoing.lend([memoryview(DATA)])
    assert loan is not None
    ends.outgoing.withdraw(loan)
    assert ends.discarded == [loan.segment]
    assert ends.pool.size == 0
    assert ends.send(DATA) is None
    assert loan.segment not in ends.pool.segments(1)


# ---- what the system refuses


REFUSALS = {
    "Too many open files": (resource.RLIMIT_NOFILE, 0),
    "Cannot allocate memory": (resource.RLIMIT_AS, 1 << 20),
    "File too large": (resource.RLIMIT_FSIZE, 4096),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_a_sender_that_can_make_no_segment_says_so_and_goes_on(ends: Ends, said: str) -> None:
    data = memoryview(bytes(8 * MIB))

    def limited() -> None:
        limit, soft = REFUSALS[said]
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
        for _ in range(3):
            assert ends.outgoing.lend([data]) is None
        assert ends.said == [said]
        assert ends.pool.size == 0

    in_child(limited)


def test_a_sender_without_memory_for_a_segment_that_there_is_goes_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ends.send(DATA)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for _ in range(3):
        assert ends.send(DATA) is None
    assert ends.said == ["Cannot allocate memory"]
    assert ends.pool.size == 0


def test_a_receiver_that_may_open_no_more_files_refuses_and_the_sender_goes_on(ends: Ends) -> None:
    assert ends.outgoing.lend([memoryview(DATA)]) is None

    def limited() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert ends.introduce() == 1
        assert ends.outgoing.lend([memoryview(DATA)]) is None
        assert "cannot take it" in ends.said[0]
        assert ends.pool.size == 0

    in_child(limited)


def test_a_receiver_takes_no_more_than_its_bounds(ends: Ends) -> None:
    for number in range(9):
        ends.introduce_raw(100 + number, number, MIB, 1, create(MIB))
    assert ends.incoming.size == 8 * MIB
    assert ends.ledger.words[8] == REFUSED
    ends.incoming.drop([100, 101])
    ends.introduce_raw(200, 9, 63 * MIB, 1, create(63 * MIB))
    assert ends.ledger.words[9] == REFUSED
    assert ends.incoming.size == 6 * MIB


# ---- what a peer does wrong


def unsealed(size: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def read_only(size: int) -> int:
    descriptor = unsealed(size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return descriptor


BAD_DESCRIPTORS: dict[str, Callable[[], int | None]] = {
    "never arrives": lambda: None,
    "not sealed": lambda: unsealed(MIB),
    "too short": lambda: create(MIB // 2),
    "too long": lambda: create(2 * MIB),
    "cannot be written": lambda: read_only(MIB),
    "no memory": lambda: os.open("/dev/null", os.O_RDWR),
    "a file": lambda: os.open("/proc/self/exe", os.O_RDONLY),
}


@pytest.mark.parametrize("make", BAD_DESCRIPTORS.values(), ids=BAD_DESCRIPTORS)
def test_a_bad_descriptor_is_refused_and_closed(ends: Ends, make: Callable[[], int | None]) -> None:
    before = open_descriptors()
    ends.introduce_raw(1, 0, MIB, 7, make())
    assert open_descriptors() == before
    assert ends.ledger.words[0] == REFUSED
    with pytest.raises(ProtocolError, match="no segment that was introduced"):
        ends.incoming.open(1, 8, [5], MIB)


INTRODUCTIONS: dict[str, tuple[Any, ...]] = {
    "no numbers": ("1", 0, MIB, 7),
    "a slot beyond the ledger": (1, SLOTS, MIB, 7),
    "a slot before it": (1, -1, MIB, 7),
    "no size": (1, 0, 0, 7),
    "a mark for a use": (1, 0, MIB, REFUSED),
    "no use": (1, 0, MIB, 0),
    "a boolean": (True, 0, MIB, 7),
}


@pytest.mark.parametrize("introduction", INTRODUCTIONS.values(), ids=INTRODUCTIONS)
def test_a_malformed_introduction_is_an_error_and_leaves_nothing(
    ends: Ends, introduction: tuple[Any, ...]
) -> None:
    before = open_descriptors()
    number, slot, size, use = introduction
    with pytest.raises(ProtocolError, match="malformed introduction"):
        ends.introduce_raw(number, slot, size, use, create(MIB))
    assert open_descriptors() == before


def test_a_segment_is_introduced_once(ends: Ends) -> None:
    ends.introduce_raw(1, 0, MIB, 7, create(MIB))
    with pytest.raises(ProtocolError, match="malformed introduction"):
        ends.introduce_raw(1, 1, MIB, 8, create(MIB))


NAMED: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "another segment": (2, 8, (5,)),
    "more than there is": (1, 8, (MIB + 1,)),
    "together more than there is": (1, 8, (MIB // 2, 1, MIB // 2)),
    "far more than there is": (1, 8, ((1 << 64) - 1, 2)),
    "a mark for a use": (1, RETIRED, (5,)),
    "no use": (1, 0, (5,)),
}


@pytest.mark.parametrize(("number", "use", "lengths"), NAMED.values(), ids=NAMED)
def test_a_message_that_names_no_memory_is_an_error(
    ends: Ends, number: int, use: int, lengths: tuple[int, ...]
) -> None:
    ends.introduce_raw(1, 0, MIB, 7, create(MIB))
    with pytest.raises(ProtocolError):
        ends.incoming.open(number, use, lengths, 1 << 40)
    assert ends.ledger.words[0] == 7


def test_a_message_over_the_limit_is_an_error(ends: Ends) -> None:
    ends.introduce_raw(1, 0, MIB, 7, create(MIB))
    with pytest.raises(ProtocolError, match="1000 bytes"):
        ends.incoming.open(1, 8, [1000], 999)


def test_memory_that_is_still_in_use_cannot_be_named_again(ends: Ends) -> None:
    ends.introduce_raw(1, 0, MIB, 7, create(MIB))
    kept = ends.incoming.open(1, 8, [1000], MIB)
    with pytest.raises(ProtocolError, match="still in use"):
        ends.incoming.open(1, 9, [1000], MIB)
    del kept
    assert ends.ledger.words[0] == 8
    ends.incoming.open(1, 9, [1000], MIB)


def test_dropping_what_is_not_there_does_no_harm(ends: Ends) -> None:
    ends.introduce_raw(1, 0, MIB, 7, create(MIB))
    ends.incoming.drop([2, 3])
    malformed: list[Any] = [None, 5, {"a": 1}, [[]], ["one"]]
    for numbers in malformed:
        with pytest.raises(ProtocolError):
            ends.incoming.drop(numbers)
    assert ends.incoming.size == MIB


# ---- forks


def test_after_a_fork_what_was_received_is_each_ones_own(ends: Ends) -> None:
    ends.send(DATA)
    buffers = ends.send(DATA)
    assert buffers is not None
    array = np.frombuffer(buffers[0], np.uint8)

    def change() -> None:
        assert array[1] == 1
        array[:] = 77

    in_child(change)
    assert bytes(buffers[0]) == DATA
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has changed its own
        os._exit(0 if bytes(buffers[0]) == DATA else 1)
    array[:] = 88
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reading)


def test_after_a_fork_no_segment_of_before_is_used_again(ends: Ends) -> None:
    ends.send(DATA)
    ends.send(DATA)
    buffers = ends.send(DATA)
    before = set(ends.pool.segments(1))
    in_child(lambda: None)
    del buffers
    for _ in range(4):
        buffers = ends.send(DATA)
        assert buffers is None or bytes(buffers[0]) == DATA
        del buffers
    assert before
    assert not before & set(ends.pool.segments(1))
    assert ends.pool.size < 4 * MIB


def test_what_is_under_way_at_a_fork_arrives(ends: Ends) -> None:
    ends.send(DATA)
    loan = ends.outgoing.lend([memoryview(DATA)])
    assert loan is not None
    in_child(lambda: None)
    assert bytes(ends.open(loan)[0]) == DATA


def test_a_segment_is_dropped_after_a_fork_when_the_message_in_it_is_out(ends: Ends) -> None:
    ends.send(DATA)
    loan = ends.outgoing.lend([memoryview(DATA)])
    assert loan is not None
    in_child(lambda: None)
    ends.outgoing.note_returns(0.0)
    assert not ends.discarded
    ends.outgoing.sent(loan)
    ends.outgoing.note_returns(0.0)
    assert ends.discarded == [loan.segment]


def test_a_child_returns_nothing(ends: Ends) -> None:
    ends.send(DATA)
    buffers = ends.send(DATA)
    slot = ends.pool.segments(1)[0].slot

    def release() -> None:
        nonlocal buffers
        buffers = None
        gc.collect()

    in_child(release)
    assert ends.ledger.words[slot] == RETIRED
