"""The default job: one that runs, and the one that hangs, whichever of them has written last."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from farcall.observe.format.jobs import find_job
from farcall.observe.format.layout import Beat
from farcall.observe.reading.processes import start_of
from farcall.observe.why.choosing import Choice, choose_job
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


@pytest.mark.parametrize(
    ("written", "last", "chosen", "others"),
    [
        *(
            ("hangs moves moves-too over", last, "hangs", ("moves-too (moves-too.py)", "moves (moves.py)"))
            for last in ("hangs", "moves", "moves-too")
        ),
        ("moves moves-too", "moves", "moves-too", ("moves (moves.py)",)),
        ("moves over", "over", "moves", ()),
        ("over over-too", "over", "over", ()),
    ],
)
def test_of_live_jobs_the_one_that_hangs_is_chosen_and_else_the_newest(
    tmp_path: Path, written: str, last: str, chosen: str, others: tuple[str, ...]
) -> None:
    for began, name in enumerate(written.split(), 100):
        threads = (blocked(1, 2), blocked(2, 1)) if name == "hangs" else ()
        phase = "left" if name.startswith("over") else "running"
        leave_job(tmp_path, name, *threads, began=began, phase=phase)
    touch(tmp_path, last, time.time() + 5)
    choice = choose_job(tmp_path, None)
    assert (choice.job.id, choice.others) == (chosen, others)


def test_other_jobs_that_live_are_named(tmp_path: Path) -> None:
    for began, name in enumerate(("first", "second", "third")):
        leave_job(tmp_path, name, began=began)
    said: list[str] = []
    choose_job(tmp_path, None).tell(said.append)
    assert said == [
        "shown: job third; --job NAME shows others that run: second (second.py), first (first.py)"
    ]
    assert choose_job(tmp_path, "fir") == Choice(find_job(tmp_path, "first"))
