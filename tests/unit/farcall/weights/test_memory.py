"""How processes of one host map each other's segments."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall.weights import memory
from farcall.weights.memory import Access, Segment, map_segment, open_segment
from rpc.bulk.shared_memory.memory import SegmentRefused

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="processes cannot share memory here")


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(1, 64)
    yield made
    made.close()


def write_seven(process: int, place: list[Any]) -> None:
    descriptor = open_segment(process, place[0], place[1], 64)
    map_segment(descriptor, 64, Access.WRITE).data.fill_(7)


def test_another_process_writes_to_a_segment(segment: Segment) -> None:
    assert segment.place is not None
    process = multiprocessing.get_context("fork").Process(
        target=write_seven, args=(os.getpid(), segment.place)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert segment.tensor.tolist() == [7] * 64


def test_another_file_is_not_taken_for_a_segment(segment: Segment) -> None:
    """A descriptor that is used for something else by now, and one that is no segment."""
    assert segment.place is not None
    number, identity = segment.place
    with open(os.devnull) as other:
        with pytest.raises(FileNotFoundError):
            open_segment(os.getpid(), other.fileno(), identity, 64)
        with pytest.raises(SegmentRefused):
            open_segment(os.getpid(), other.fileno(), memory.identity_of(other.fileno()), 64)
    with pytest.raises(SegmentRefused, match="of 64 bytes and said that it has 65"):
        open_segment(os.getpid(), number, identity, 65)
    with pytest.raises(FileNotFoundError):
        open_segment(1 << 30, number, identity, 64)


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job/step", "job", {"max": 900, "current": 700, "stat": "active_file 30\ninactive_file 20\n"}),
        (
            "4:memory:/job/step",
            "memory/job",
            {
                "limit_in_bytes": 900,
                "usage_in_bytes": 700,
                "stat": "active_file 1\ntotal_active_file 30\ntotal_inactive_file 20\n",
            },
        ),
    ],
)
def test_the_limits_of_all_control_groups_count(
    tmp_path: Path, line: str, folder: str, files: dict[str, Any]
) -> None:
    """The process is in a group below the one with the limit, as in a job of Slurm; it may use the cache."""
    (tmp_path / folder / "step").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / folder / f"memory.{name}").write_text(str(content))
    membership = tmp_path / "membership"
    membership.write_text(f"{line}\n")
    assert memory.available_bytes(tmp_path, membership) == 250
