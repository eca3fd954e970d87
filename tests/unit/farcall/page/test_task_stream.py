"""Tasks that are followed from one look at a job to the next."""

from __future__ import annotations

from farcall.observe.reading.state import Process
from farcall.page.task_stream import Task, TaskStream
from tests.support.job_states import NOW, WALL, call, job, main_thread, request, worker


def only(stream: TaskStream, version: int = 0) -> Task:
    (task,) = stream.since(version)
    return task


def test_call_has_its_true_begin_and_ends_between_two_looks() -> None:
    stream = TaskStream()
    stream.follow(job(worker(0, calls=[call(1, 1, "train", began=NOW - 3)]), worker(1)))
    task = only(stream)
    assert (task.kind, task.lane, task.by, task.what) == ("call", "worker1", "worker0", "train")
    assert (task.began, task.ended, task.how) == (WALL - 3, None, "runs")
    version = stream.version
    stream.follow(job(worker(0, at=0.5), worker(1)))
    task = only(stream, version)
    assert (task.ended, task.how) == (WALL + 0.5, "done")


def test_call_is_not_longer_than_it_was_seen() -> None:
    """A look that comes late does not know when it ended."""
    stream = TaskStream()
    stream.follow(job(worker(0, calls=[call(1, 1, began=NOW - 3)])))
    stream.follow(job(worker(0, at=60.0)))
    assert only(stream).ended == WALL + 1.0


def test_same_look_seen_twice_ends_nothing() -> None:
    stream = TaskStream()
    state = job(worker(0, calls=[call(1, 1)]))
    stream.follow(state)
    version = stream.version
    stream.follow(state)
    assert stream.since(version) == []


def test_call_of_a_worker_that_died_is_lost() -> None:
    stream = TaskStream()
    stream.follow(job(worker(0, calls=[call(1, 1)])))
    stream.follow(job(worker(0, process=Process(alive=False), calls=[call(1, 1)])))
    task = only(stream)
    assert (task.how, task.ended) == ("lost", WALL)


def test_queued_call_begins_to_run() -> None:
    stream = TaskStream()
    stream.follow(job(worker(0, calls=[call(1, 1)]), worker(1, requests=[request(0, 1, "queued")])))
    assert only(stream).how == "queued"
    version = stream.version
    caller = worker(0, at=0.5, calls=[call(1, 1)])
    stream.follow(job(caller, worker(1, at=0.5, requests=[request(0, 1)])))
    assert only(stream, version).how == "runs"


def test_wait_in_a_group_is_a_task_of_its_worker() -> None:
    stream = TaskStream()
    stream.follow(job(worker(3, main_thread(waits=[{"what": "all_reduce(16)", "since": NOW - 2}]))))
    task = only(stream)
    assert (task.kind, task.lane, task.what, task.began) == ("group", "worker3", "all_reduce(16)", WALL - 2)
