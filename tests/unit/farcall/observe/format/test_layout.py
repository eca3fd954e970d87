"""State files: what was written is read, and what is damaged is skipped."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.observe.format.layout import MAX_SNAPSHOT_BYTES, Beat, LayoutError, unpack_state
from farcall.observe.worker.state_file import StateFile

BEAT = Beat(3, 10.0, 20.0, 4, 5, 1.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "one" / "host.1.1.state"


def test_what_was_written_is_read(path: Path) -> None:
    file = StateFile(path)
    for number in (1, 2):
        assert file.snapshot({"number": number, "names": ["a", "\udcff"]})
        file.beat(BEAT)
    state = unpack_state(path.read_bytes())
    assert state.beat == BEAT
    assert state.snapshot == {"number": 2, "names": ["a", "\\udcff"]}
    assert state.earlier is not None
    assert state.earlier["number"] == 1


def test_snapshot_from_before_is_kept_when_that_is_wanted(path: Path) -> None:
    file = StateFile(path)
    for number in (1, 2, 3):
        file.snapshot({"number": number}, keep=number == 3)
    file.beat(BEAT)
    state = unpack_state(path.read_bytes())
    assert (state.snapshot, state.earlier) == ({"number": 3}, {"number": 1})


def test_snapshot_that_is_too_large_is_refused(path: Path) -> None:
    file = StateFile(path)
    file.snapshot({"number": 1})
    assert not file.snapshot({"text": "x" * MAX_SNAPSHOT_BYTES})
    file.beat(BEAT)
    assert unpack_state(path.read_bytes()).snapshot == {"number": 1}


def test_another_version_is_named() -> None:
    with pytest.raises(LayoutError, match="version 9"):
        unpack_state(b"FARCALLS" + msgpack.packb([9, None, {}, None]))


@given(st.binary(max_size=200), st.booleans())
def test_damage_is_an_error(damage: bytes, begins_well: bool) -> None:
    with pytest.raises(LayoutError):
        unpack_state(b"FARCALLS" * begins_well + damage)
