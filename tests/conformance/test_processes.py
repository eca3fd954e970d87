"""The conformance harness tells passing, failing, skipping and hanging tests apart, and leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
import unittest
from pathlib import Path

from tests.conformance.processes import Ending, Outcome, Pool
from tests.support.workers import RunWorkers, Worker


def body(task: str, rank: int, folder: Path) -> None:
    print(f"{task} on {rank}")
    if task == "share":
        with open(folder / "shared", "a") as file:
            file.write(str(rank))
    if rank == 1:
        match task:
            case "fail":
                raise ValueError("no good")
            case "die":
                os.kill(os.getpid(), signal.SIGTERM)
            case "leave":
                raise SystemExit(3)
            case "hang" | "fail while others hang":
                threading.Event().wait()
    if task == "skip":
        raise unittest.SkipTest("not on this machine")
    if task == "fail while others hang" and rank == 0:
        raise ValueError("no good")


def run_all(worker: Worker, tasks: list[str], limit: float) -> list[Outcome[str]]:
    pool = Pool(body, worker.folder / "runs", workers=lambda _: 2, jobs=2, limit=limit)
    return sorted(pool.run(tasks), key=lambda outcome: tasks.index(outcome.task))


def run(run_workers: RunWorkers, *tasks: str, limit: float = 30) -> list[Outcome[str]]:
    [outcomes] = run_workers(run_all, 1, [list(tasks), limit])
    return list(outcomes)


def test_endings(run_workers: RunWorkers) -> None:
    passed, failed, died, left, skipped = run(run_workers, "pass", "fail", "die", "leave", "skip")
    assert passed.ending is Ending.PASSED
    assert passed.logs == ("pass on 0\n", "pass on 1\n")
    assert failed.ending is Ending.FAILED
    assert failed.complaint() == "worker 1: ValueError: no good"
    assert died.ending is Ending.FAILED
    assert died.exits == (0, -signal.SIGTERM)
    assert left.exits == (0, 3)
    assert left.ending is Ending.FAILED
    assert skipped.ending is Ending.SKIPPED
    assert "not on this machine" in skipped.logs[0]


def test_what_hangs_is_killed_with_its_stacks_in_the_log(run_workers: RunWorkers) -> None:
    [outcome] = run(run_workers, "hang", limit=0.3)
    assert outcome.ending is Ending.TIMED_OUT
    assert outcome.exits == (0, -signal.SIGKILL)
    assert "in wait" in outcome.logs[1]
    assert "in body" in outcome.logs[1]


def test_what_waits_for_a_worker_that_failed_is_killed_soon(run_workers: RunWorkers) -> None:
    [outcome] = run(run_workers, "fail while others hang")
    assert outcome.ending is Ending.FAILED
    assert outcome.complaint() == "worker 0: ValueError: no good"
    assert outcome.seconds < 20


def test_workers_of_a_test_share_a_folder(run_workers: RunWorkers, tmp_path: Path) -> None:
    run(run_workers, "share")
    assert sorted((tmp_path / "runs" / "001" / "shared").read_text()) == ["0", "1"]
