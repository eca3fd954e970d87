"""The layout of state files: what was written is read, and what is torn or damaged is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.observe.format.layout import (
    FILE_BYTES,
    HEADER_BYTES,
    RING_SLOTS,
    Beat,
    LayoutError,
    record_offset,
    snapshot_offset,
    unpack_beat,
    unpack_header,
    unpack_records,
    unpack_snapshots,
)
from farcall.observe.worker.state_file import StateFile

BEAT = Beat(3, 10.0, 20.0, 4, 5, 1.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "one" / "host.1.1.state"


def test_what_was_written_is_read(path: Path) -> None:
    file = StateFile(path)
    file.beat(BEAT)
    assert file.snapshot({"number": 1})
    assert file.snapshot({"number": 2, "names": ["a", "\udcff"]})
    file.record([{"kind": "a", "at": 1.0}, {"kind": "b"}])
    file.close()
    data = path.read_bytes()
    unpack_header(data)
    assert unpack_beat(data) == BEAT
    assert unpack_snapshots(data)[0] == {"number": 2, "names": ["a", "\\udcff"]}
    assert [(each.number, each.fields["kind"]) for each in unpack_records(data)] == [(1, "a"), (2, "b")]


def test_file_and_folder_are_for_this_user_alone(path: Path) -> None:
    StateFile(path).close()
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path.parent).st_mode & 0o777 == 0o700
    assert os.stat(path).st_size == FILE_BYTES <= 4 << 20


def test_torn_snapshot_gives_way_to_the_one_before(path: Path) -> None:
    file = StateFile(path)
    file.snapshot({"number": 1})
    file.snapshot({"number": 2})
    file.close()
    data = bytearray(path.read_bytes())
    data[snapshot_offset(2) + 20] ^= 1
    assert unpack_snapshots(bytes(data)) == [{"number": 1}]
    data[snapshot_offset(1) + 20] ^= 1
    assert unpack_snapshots(bytes(data)) == []


def test_torn_record_is_skipped(path: Path) -> None:
    file = StateFile(path)
    file.record([{"kind": str(number)} for number in range(1, 4)])
    file.close()
    data = bytearray(path.read_bytes())
    data[record_offset(2) + 20] ^= 1
    assert [each.number for each in unpack_records(bytes(data))] == [1, 3]


def test_ring_keeps_the_newest(path: Path) -> None:
    file = StateFile(path)
    file.record([{"kind": "x"} for _ in range(RING_SLOTS + 10)])
    file.close()
    numbers = [each.number for each in unpack_records(path.read_bytes())]
    assert numbers == list(range(11, RING_SLOTS + 11))


def test_record_that_does_not_fit_is_shortened(path: Path) -> None:
    file = StateFile(path)
    file.record([{"kind": "call", "at": 1.0, "what": "x" * 1000}, {"kind": "b", "list": ["y"] * 500}])
    file.close()
    first, second = unpack_records(path.read_bytes())
    assert first.fields == {"kind": "call", "at": 1.0, "what": "x" * 60}
    assert second.fields == {"kind": "b"}


def test_snapshot_that_does_not_fit_is_refused(path: Path) -> None:
    file = StateFile(path)
    file.snapshot({"number": 1})
    assert not file.snapshot({"text": "x" * FILE_BYTES})
    file.close()
    assert unpack_snapshots(path.read_bytes())[0] == {"number": 1}


def test_another_version_is_named(path: Path) -> None:
    StateFile(path).close()
    data = bytearray(path.read_bytes())
    data[8] = 9
    with pytest.raises(LayoutError, match="version 9"):
        unpack_header(bytes(data))


@given(st.binary(max_size=200), st.integers(0, FILE_BYTES - 200))
def test_damage_is_never_believed(damage: bytes, offset: int) -> None:
    data = bytearray(FILE_BYTES)
    data[offset : offset + len(damage)] = damage
    content = bytes(data)
    assert unpack_beat(content) is None or not any(damage)
    assert unpack_snapshots(content) == []
    assert unpack_records(content) == []
    if damage[:8] != b"FARCALLS":
        with pytest.raises(LayoutError):
            unpack_header(content[:HEADER_BYTES])
