"""The fixture ``run_workers`` itself: what a test can do with workers, and how their failures look."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading

import pytest

from tests.support import leftovers
from tests.support.standing import Shared
from tests.support.workers import RunWorkers, Task, Worker, WorkersFailed


def ping_pong(worker: Worker) -> int:
    thread = threading.Thread(target=worker.report, args=("ready", worker.rank))  # any thread may
    thread.start()
    thread.join()
    total = 0
    for _ in range(3):
        total += worker.wait_for("number")
        worker.report("total", total)
    return total


def test_test_and_worker_exchange_events_also_when_one_was_stopped_or_came_later(
    run_workers: RunWorkers,
) -> None:
    workers = run_workers.start(ping_pong, 1)
    workers.add(ping_pong, name="late", rank=5)
    assert workers.wait_for("ready") == [0, 5]
    workers[0].stop()
    assert leftovers.process_state(workers[0].pid) == "T"
    for number in (1, 2, 3):
        workers.tell("number", number)
    assert [workers[1].wait_for("total") for _ in range(3)] == [1, 3, 6]
    workers[0].resume()
    assert workers.results() == [6, 6]


def wait_for_ever(worker: Worker) -> str:
    try:
        worker.report("waiting")
        worker.wait_for("nothing")
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def test_a_worker_can_be_killed_kill_itself_or_be_interrupted(run_workers: RunWorkers) -> None:
    workers = run_workers.start([wait_for_ever, wait_for_ever, Worker.die])
    for rank in (0, 1):
        workers[rank].wait_for("waiting")
    workers[0].kill()
    workers[1].interrupt()
    assert workers.results() == [None, "interrupted", None]
    assert workers[0].exit_status == -signal.SIGKILL


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


def process(_: Worker) -> int:
    return os.getpid()


def test_shared_tasks_run_in_workers_that_stay_until_one_fails(run_workers: RunWorkers) -> None:
    stay = Shared(contextlib.nullcontext, process)
    first = run_workers(stay, 2)
    assert len({*first}) == 2
    assert run_workers(stay, 2) == first
    with pytest.raises(WorkersFailed, match="no such thing"):
        run_workers(Shared(contextlib.nullcontext, fail), 2)
    assert not {*run_workers(stay, 2)} & {*first}


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
