"""The fixture ``run_workers`` itself: a worker that fails, hangs or leaves something behind is a failure."""

from __future__ import annotations

import functools
import os
import subprocess
import threading

import pytest

from tests.support import leftovers
from tests.support.workers import RunWorkers, Task, Worker, WorkersFailed


def wait_for_ever(worker: Worker) -> None:
    worker.report("waiting")
    worker.wait_for("nothing")


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


def fail(_: Worker) -> None:
    print("about to fail")
    raise LookupError("no such thing")


def fail_unpicklably(_: Worker) -> None:
    raise Unpicklable("text remains")


def outlive(worker: Worker) -> None:
    threading.Thread(target=threading.Event().wait).start()
    worker.report("waiting")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (fail, ["worker0: raised", 'raise LookupError("no such thing")', "about to fail"]),
        (fail_unpicklably, ["text remains"]),
        (lambda _: os._exit(3), ["exited with status 3 before returning"]),
        (lambda _: os.abort(), ["was killed by SIGABRT before returning"]),
    ],
)
def test_how_a_worker_failed_is_told(run_workers: RunWorkers, end: object, said: list[str]) -> None:
    with pytest.raises(WorkersFailed) as caught:
        run_workers([end])  # type: ignore[list-item]
    for text in said:
        assert text in str(caught.value)


@pytest.mark.parametrize("end", [wait_for_ever, outlive])
def test_how_a_worker_failed_that_takes_too_long_is_told(run_workers: RunWorkers, end: Task) -> None:
    workers = run_workers.start(end, 1)
    workers[0].wait_for("waiting")
    workers.restart_clock(0.5)
    with pytest.raises(WorkersFailed) as caught:
        workers.results()
    assert "the time limit of 0.5 s was over before every worker ends" in str(caught.value)
    assert f"in {'wait_for_ever' if end is wait_for_ever else 'wait'}" in str(caught.value)


def leave_a_process(_: Worker) -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def test_what_a_test_leaves_behind_is_a_failure(
    run_workers: RunWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_workers.start(fail, 1)
    with pytest.raises(WorkersFailed, match="no such thing"):
        run_workers.close()
    (pid,) = run_workers(leave_a_process, 1)
    monkeypatch.setattr(leftovers, "processes", functools.partial(leftovers.processes, patience=0.1))
    with pytest.raises(WorkersFailed, match=f"left a process behind: process {pid}"):
        run_workers.close()
