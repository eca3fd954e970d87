"""The default job: one that runs, and the one that hangs, whichever of them has written last."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from farcall.observe.format.layout import Beat
from farcall.observe.reading.processes import start_of
from farcall.observe.why.choosing import choose_job
from farcall.observe.worker.state_file import StateFile


def leave_job(folder: Path, job: str, *threads: dict[str, Any], began: float, phase: str = "running") -> None:
    """A job with one worker, in this process."""
    now = time.monotonic()
    file = StateFile(folder / job / f"{socket.gethostname()}.{os.getpid()}.1.state")
    facts = {
        "name": "worker0",
        "rank": 0,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": start_of(os.getpid()),
        "phase": phase,
        "program": f"{job}.py",
        "began": began,
    }
    moved = now - (10 if threads else 0)
    file.snapshot({"worker": facts, "monotonic": now, "threads": threads, "moved": moved, "called": moved})
    file.beat(Beat(1, now, time.time(), 0, 0, 0.0))


def blocked(ident: int, by: int) -> dict[str, Any]:
    since = time.monotonic() - 10
    fields = {"on": "lock", "kind": "lock", "doing": "waits for a lock", "holder": by, "sure": True}
    return {"id": ident, "name": f"thread-{ident}", "since": since, **fields}


def touch(folder: Path, job: str, at: float) -> None:
    for path in (folder / job).iterdir():
        os.utime(path, (at, at))


@pytest.mark.parametrize("last", ["hangs", "moves", "moves-too"])
def test_of_live_jobs_the_one_that_hangs_is_chosen_and_the_others_are_named(
    tmp_path: Path, last: str
) -> None:
    leave_job(tmp_path, "hangs", blocked(1, 2), blocked(2, 1), began=100.0)
    leave_job(tmp_path, "moves", began=200.0)
    leave_job(tmp_path, "moves-too", began=300.0)
    leave_job(tmp_path, "over", began=400.0, phase="left")
    touch(tmp_path, last, time.time() + 5)
    choice = choose_job(tmp_path, None)
    assert choice.job.id == "hangs"
    assert choice.others == ("moves-too (moves-too.py)", "moves (moves.py)")
    said: list[str] = []
    choice.tell(said.append)
    assert said == [
        "shown: job hangs; --job NAME shows others that run: moves-too (moves-too.py), moves (moves.py)"
    ]


def test_of_jobs_that_move_the_one_that_began_last_is_chosen(tmp_path: Path) -> None:
    leave_job(tmp_path, "first", began=100.0)
    leave_job(tmp_path, "second", began=200.0)
    touch(tmp_path, "first", time.time() + 5)
    assert choose_job(tmp_path, None).job.id == "second"
    assert choose_job(tmp_path, "fir").job.id == "first"


def test_a_live_job_comes_before_one_that_is_over_and_has_written_later(tmp_path: Path) -> None:
    leave_job(tmp_path, "runs", began=100.0)
    leave_job(tmp_path, "over", began=200.0, phase="left")
    touch(tmp_path, "over", time.time() + 5)
    choice = choose_job(tmp_path, None)
    assert (choice.job.id, choice.others) == ("runs", ())


def test_of_jobs_that_are_over_the_last_one_is_chosen(tmp_path: Path) -> None:
    leave_job(tmp_path, "one", began=100.0, phase="left")
    leave_job(tmp_path, "two", began=200.0, phase="left")
    touch(tmp_path, "one", time.time() + 5)
    assert choose_job(tmp_path, None).job.id == "one"
    with pytest.raises(LookupError, match="no job of this user"):
        choose_job(tmp_path / "none", None)
