"""Segments as they are made, and as another process must have made them."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc.bulk.shared_memory.memory import Mapping, SegmentRefused, check, create
from tests.unit.rpc.bulk.shared_memory.ends import in_child, open_descriptors

SIZE = 1 << 16


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create(SIZE)
    yield made
    os.close(made)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_a_segment_that_could_change_its_size_is_refused(seals: int) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(SegmentRefused, match="could still change its size"):
        check(descriptor, SIZE)
    os.close(descriptor)


def test_an_unmapped_segment_leaves_nothing(descriptor: int) -> None:
    before = open_descriptors()
    mapping = Mapping(descriptor, SIZE, keep=True)
    address = f"{mapping.address:x}-"
    with open("/proc/self/maps") as maps:
        assert any(line.startswith(address) for line in maps)
    kept = os.dup(descriptor)
    del mapping
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(address) for line in maps)
    assert len(open_descriptors()) == len(before)
    os.dup2(kept, descriptor)
    os.close(kept)


def test_a_segment_takes_memory_when_it_is_allocated(descriptor: int) -> None:
    mapping = Mapping(os.dup(descriptor), SIZE, keep=True)
    assert os.fstat(descriptor).st_blocks == 0
    mapping.allocate()
    assert os.fstat(descriptor).st_blocks * 512 == SIZE
    mapping.allocate()


def test_nobody_can_change_the_size_of_a_segment(descriptor: int) -> None:
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    check(descriptor, SIZE)


def test_memory_that_there_is_not_is_an_error_and_no_signal() -> None:
    def limited() -> None:
        made = create(SIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, SIZE))
        before = open_descriptors()
        with pytest.raises(OSError, match="File too large"):
            create(2 * SIZE)
        assert open_descriptors() == before
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        with pytest.raises(OSError, match="Cannot allocate memory"):
            Mapping(made, SIZE)

    in_child(limited)


def test_a_private_mapping_stays_where_and_as_it_is_and_is_its_own(descriptor: int) -> None:
    writer, mapping = Mapping(descriptor, SIZE), Mapping(os.dup(descriptor), SIZE, keep=True)
    writer.memory[:4] = b"once"
    before, address = open_descriptors(), mapping.address
    mapping.make_private()
    assert mapping.address == address
    assert bytes(mapping.memory[:4]) == b"once"
    assert len(open_descriptors()) == len(before) - 1
    mapping.memory[0:1] = b"O"
    assert bytes(writer.memory[:4]) == b"once"
