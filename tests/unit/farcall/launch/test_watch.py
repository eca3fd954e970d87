"""What a launcher says of the other workers when one has failed."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest

from farcall.launch.failures import Failure
from farcall.launch.job import Job
from farcall.launch.watch import JobWatch
from farcall.observe.format.layout import Beat
from farcall.observe.reading.processes import start_of
from farcall.observe.worker.state_file import StateFile


def write(
    folder: Path, rank: int, line: int, *waits: dict[str, Any], last_look: float = 0.0, lives: bool = False
) -> None:
    """Write the file of a worker: where it was a second ago, and that it has begun to leave.

    Args:
        last_look: time of its last look, in seconds from now.
        lives: whether its process has not ended yet.
    """
    state = StateFile(folder / f"{rank}.state")
    start = start_of(os.getpid()) if lives else 0
    facts = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "start": start}
    thread = {"id": 7, "name": "MainThread", "since": monotonic() - 4, "at": ["<module>", "program.py", line]}
    for at, phase, threads in ((-1.0, "running", [thread | {"waits": waits}]), (last_look, "leaving", [])):
        worker = facts | {"name": f"worker{rank}", "phase": phase}
        snapshot = {"worker": worker, "monotonic": monotonic() + at, "wall": time() + at, "threads": threads}
        assert state.snapshot(snapshot)
    state.beat(Beat(2, monotonic() + last_look, time() + last_look, 0, 0, 0.0))


def wait_for(name: str) -> dict[str, Any]:
    return {"what": "barrier", "since": monotonic() - 4, "details": {}, "whom": [name]}


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobWatch:
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path))
    found = JobWatch(Job(3), "program.py")
    found.begin("job")
    return found


@pytest.mark.parametrize("last_look", [0.0, -0.6], ids=["after the failure is known", "before it is known"])
def test_wait_of_a_worker_that_has_ended_because_another_failed_is_said(
    watch: JobWatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], last_look: float
) -> None:
    write(tmp_path / "job", 0, 12, wait_for("worker1"), lives=True)
    write(tmp_path / "job", 1, 10)
    write(tmp_path / "job", 2, 12, wait_for("worker0"), last_look=last_look)
    failure = Failure(1, 1, 1, time() - 0.5, "LookupError: bad luck")
    watch.failed([Failure(2, 2, 1, time(), "WorkerLostError: worker1 is gone")])  # the first that has ended
    watch.explain(failure)
    said = capsys.readouterr().err
    assert "worker1 was last seen in <module>, at program.py:10" in said
    for worker, awaited in (("worker0", "worker1"), ("worker2", "worker0")):
        line = rf"{worker}: MainThread waited \d+ s in barrier for {awaited}, at program\.py:12"
        assert re.search(line, said)


def test_wait_of_a_worker_that_had_ended_long_before_is_not_said(
    watch: JobWatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file is left from an earlier start of the job, with more workers."""
    write(tmp_path / "job", 0, 12, wait_for("worker1"), lives=True)
    write(tmp_path / "job", 1, 10)
    write(tmp_path / "job", 2, 12, wait_for("worker0"), last_look=-60.0)
    failure = Failure(1, 1, 1, time() - 0.5)
    watch.failed([failure])
    watch.explain(failure)
    said = capsys.readouterr().err
    assert "worker0: MainThread waited" in said
    assert "worker2" not in said


@pytest.mark.parametrize(
    ("message", "is_said"),
    [("GroupMismatchError: the name 'worker' is not unique", False), ("LookupError: bad luck", True)],
    ids=["the failure of all", "the failure of one"],
)
def test_waits_in_rendezvous_are_not_said_of_a_rendezvous_that_has_failed(
    watch: JobWatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], message: str, is_said: bool
) -> None:
    details = {"world_size": 2, "present": [0]}
    waits = {"what": "rendezvous", "since": monotonic() - 4, "details": details}
    write(tmp_path / "job", 0, 12, waits, lives=True)
    write(tmp_path / "job", 1, 10)
    failure = Failure(1, 1, 1, time() - 0.5, message)
    watch.failed([failure])
    watch.explain(failure)
    assert ("in rendezvous for rank 1" in capsys.readouterr().err) is is_said
