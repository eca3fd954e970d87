"""What waits for what, and why: found in the states of workers, without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.reading.figures import row_of
from farcall.observe.reading.state import JobState, Process, WorkerState
from farcall.observe.why.analysis import Report, analyze, severity
from farcall.observe.why.words import in_words, waiting_in_words
from tests.support.effort import PROFILE
from tests.support.job_states import (
    MAIN,
    NOW,
    call,
    in_operation,
    job,
    place,
    request,
    thread,
    worker,
)


def found(*workers: WorkerState) -> Report:
    report = analyze(job(*workers))
    for line in in_words(report, 80):
        assert len(line) <= 80, line
    return report


def waits_for_call(to: int, number: int, line: int) -> dict[str, Any]:
    return thread(MAIN, call=[10 + to, number], line=line)


def test_cycle_of_calls_and_a_lock() -> None:
    report = found(
        worker(
            0,
            waits_for_call(1, 1, 16),
            thread(
                2, line=10, request=[11, 7], function="block", on="lock", kind="_thread.lock", holder=MAIN
            ),
            calls=[call(1, 1, "b_calls_a")],
            requests=[request(1, 7)],
        ),
        worker(
            1,
            thread(3, line=7, request=[10, 1], call=[10, 7]),
            calls=[call(0, 7, "block")],
            requests=[request(0, 1)],
        ),
    )
    assert [each.text for each in report.findings] == [
        "worker0 MainThread → worker1 farcall-3 → worker0 farcall-2 → lock `lock` held by MainThread"
    ]
    assert [node.place.line for node in report.nodes if node.place] == [16, 7, 10]
    assert "waits 20 s for worker1: b_calls_a" in "\n".join(in_words(report))


CALLER = worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)])
GONE = Process(alive=False)
HELD = {
    MAIN: Stack(MAIN, (("wait", "<lib>", 3), ("g", "prog.py", 4))),
    2: Stack(2, (("native", "prog.py", 9), ("run", "<ours>", 1))),
}
RUNS = {"line": 7, "request": [10, 1]}
SLEEPS = thread(MAIN, line=8, doing="sleeps")
BLOCKED = [thread(n, line=9, request=[12, n], doing="sleeps") for n in (2, 3)]
QUEUED = [request(2, 2), request(2, 3), request(0, 1, "queued", ahead=4)]
AWAITS = {"doing": "awaits Event.wait", "stack": [place(12, "wait"), place(11, "serve")]}
BROKEN = {"name": "worker1", "incarnation": 11, "state": "BROKEN", "failures": 3}
IN_RENDEZVOUS = in_operation("rendezvous", 5, world_size=4, present=[0, 2], place="host0:29500")


def in_group(number: int, operation: str) -> list[dict[str, Any]]:
    """How far a worker is in a process group."""
    return [{"name": "g", "number": number, "operation": operation}]


def in_collective(operation: str, *names: str) -> dict[str, Any]:
    return in_operation(operation, 5, group="g", number=5, operation=operation, ranks=list(names))


def chain(doing: str) -> tuple[WorkerState, ...]:
    """Three workers, the last of which does this."""
    between = thread(2, line=6, request=[10, 1], call=[12, 1])
    end = thread(2, line=7, request=[11, 1], doing=doing)
    return (
        CALLER,
        worker(1, between, calls=[call(2, 1)], requests=[request(0, 1)]),
        worker(2, end, requests=[request(1, 1)]),
    )


HANGS: dict[str, tuple[tuple[WorkerState, ...], str]] = {
    "a chain that sleeps": (chain("sleeps"), "sleeps worker2 7, 2 wait"),
    "a socket": (chain("waits for a socket"), "socket worker2 7, 2 wait"),
    "a subprocess": (chain("waits for a subprocess"), "subprocess worker2 7, 2 wait"),
    "a file": (chain("waits for a file"), "file worker2 7, 2 wait"),
    "an event": (chain("waits for an Event"), "event worker2 7, 2 wait"),
    "a thread": (chain("waits for a thread to end"), "join worker2 7, 2 wait"),
    "a callee that computes": (
        (CALLER, worker(1, thread(2, **RUNS, computes=True), requests=[request(0, 1)])),
        "computes worker1 7, 1 wait",
    ),
    "dead": ((CALLER, worker(1, SLEEPS, process=GONE)), "dead worker1 8, 1 wait"),
    "stopped": (
        (CALLER, worker(1, SLEEPS, process=Process(alive=True, stopped=True))),
        "stopped worker1 8, 1 wait",
    ),
    "traced": (
        (CALLER, worker(1, SLEEPS, process=Process(alive=True, stopped=True, traced=77))),
        "traced worker1 8, 1 wait",
    ),
    "an interpreter that is held": (
        (CALLER, worker(1, thread(MAIN, line=4, doing="sleeps"), frozen=HELD, looked=NOW - 9)),
        "frozen worker1 9, 2 wait",
    ),
    "held since before the look after the call": (
        (
            worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1, "native")]),
            worker(1, frozen={2: HELD[2]}, looked=NOW - 20),
        ),
        "frozen worker1 9, 1 wait: runs native for worker0, holds the interpreter lock in C code",
    ),
    "a call after the last look at its callee": (
        (
            worker(
                0,
                waits_for_call(1, 1, 5),
                calls=[call(1, 1, "native", NOW - 1.5) | {"defined": place(8, "native")}],
                process=GONE,
            ),
            worker(1, process=GONE, wall=998.0, looked=NOW - 2),
        ),
        (
            "unanswered worker0 5, 0 wait: worker1 last wrote its state 0.5 s before this call; "
            "native is defined at prog.py:8"
        ),
    ),
    "one that died before the others": (
        (replace(CALLER, process=GONE), worker(1, SLEEPS, process=GONE, wall=990.0)),
        "dead worker1 8, 1 wait",
    ),
    "one that died with the others": (
        (replace(CALLER, process=GONE), worker(1, thread(2, **RUNS, doing="sleeps"), process=GONE)),
        "sleeps worker1 7, 1 wait",
    ),
    "a link that is down": (
        (worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)], peers=[BROKEN]), worker(1)),
        "link worker0 5, 0 wait: the connection to worker1 is down; 3 attempts",
    ),
    "threads that are busy": (
        (CALLER, worker(1, *BLOCKED, requests=QUEUED), worker(2)),
        "sleeps worker1 9, 1 wait: queued at worker1, behind 4 others: all of its 2 threads are busy",
    ),
    "a call whose arguments arrive": (
        (CALLER, worker(1, requests=[request(0, 1, "arriving")])),
        "arriving worker0 5, 0 wait: arguments are still arriving",
    ),
    "a function that has returned a future": (
        (CALLER, worker(1, requests=[request(0, 1, "begun")])),
        "postponed worker0 5, 0 wait: the future that it returned",
    ),
    "a coroutine": (
        (CALLER, worker(1, requests=[request(0, 1, "awaiting", **AWAITS)])),
        "awaits worker1 12, 1 wait",
    ),
    "a barrier": (
        (
            worker(0, in_operation("barrier", 5, "worker2")),
            worker(1, in_operation("barrier", 5, "worker0")),
            worker(2, SLEEPS),
        ),
        "sleeps worker2 8, 2 wait",
    ),
    "a collective that a rank has not joined": (
        (
            worker(0, in_collective("all_reduce", "worker0", "worker1"), groups=in_group(5, "all_reduce")),
            worker(1, SLEEPS, groups=in_group(4, "all_reduce")),
        ),
        "sleeps worker1 8, 1 wait: waits 9 s in all_reduce for worker1",
    ),
    "a collective that a rank has joined with another": (
        (
            worker(0, in_collective("all_reduce", "worker0", "worker1"), groups=in_group(5, "all_reduce")),
            worker(1, in_collective("broadcast", "worker0", "worker1"), groups=in_group(5, "broadcast")),
        ),
        "cycle worker0 5, 2 wait: worker1 called broadcast",
    ),
    "shutdown": (
        (worker(0, in_operation("shutdown", 5)), worker(1, thread(MAIN, line=8, doing="waits for a queue"))),
        "queue worker1 8, 1 wait",
    ),
    "a rendezvous": (
        (worker(0, IN_RENDEZVOUS, phase="joining"),),
        "rendezvous worker0 5, 0 wait: 2 of 4 ranks have come to host0:29500; missing: 1, 3",
    ),
}
"""Workers, and what is found first: its kind, the culprit, its line, how many wait for it, and words."""


@pytest.mark.parametrize("name", HANGS)
def test_culprit_is_found(name: str) -> None:
    workers, expected = HANGS[name]
    report = found(*workers)
    finding = report.findings[0]
    at = finding.culprit.place
    assert at is not None
    shown, _, words = expected.partition(": ")
    assert f"{finding.kind} {finding.culprit.worker} {at.line}, {finding.waiting} wait" == shown
    assert words in " ".join(in_words(report, 1000))


def test_workers_that_do_the_same_share_a_line() -> None:
    waiting = [worker(rank, in_operation("barrier", 5, "worker63")) for rank in range(63)]
    report = found(*waiting, worker(63, thread(MAIN, line=8, doing="sleeps")))
    lines = list(in_words(report))
    assert lines[1].startswith("worker0 +62  MainThread  waits 9 s in barrier for worker63")
    assert len(lines) == 4


def test_job_in_which_nothing_waits() -> None:
    report = found(worker(0, thread(MAIN, idle=True, stack=[place(1)])))
    assert report.findings == ()


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    *("id", "name", "since", "call", "request", "at", "stack", "waits", "what", "whom", "details", "on"),
    *("holder", "incarnation", "state", "doing", "began", "number", "ranks", "group", "present", "to"),
)
records = st.dictionaries(st.sampled_from(KEYS), values | st.lists(st.integers(0, 2), max_size=2), max_size=8)


@PROFILE
@given(
    st.dictionaries(
        st.sampled_from(("worker", "threads", "calls", "requests", "peers", "spmd.node", "moved")),
        values | records | st.lists(records, max_size=3),
    )
)
def test_strange_snapshots_are_survived(snapshot: dict[str, Any]) -> None:
    report = analyze(JobState("j", (WorkerState(None, snapshot), WorkerState(None, snapshot))))
    assert list(in_words(report))
    assert report.to_json()


def test_a_job_that_moves_has_no_culprit_but_a_cycle_or_a_dead_worker_is_one() -> None:
    waiting = worker(
        0, thread(MAIN, call=[11, 1], since=NOW - 0.1), calls=[call(1, 1)], moved=NOW, called=NOW
    )
    serving = thread(5, request=[10, 1], line=7, doing="sleeps", since=NOW - 0.1)
    moving = found(waiting, worker(1, serving, moved=NOW, called=NOW, requests=[request(0, 1)]))
    assert [moving.label(each) for each in moving.findings] == ["note"]
    assert next(in_words(moving)).endswith("it is moving")
    still = found(worker(0, thread(MAIN, call=[11, 1]), calls=[call(1, 1)]), worker(1, serving))
    assert [still.label(each) for each in still.findings] == ["culprit"]
    dead = found(waiting, worker(1, process=Process(alive=False)))
    assert [(each.kind, dead.label(each)) for each in dead.findings] == [("dead", "culprit")]


def test_of_live_jobs_the_one_with_a_cycle_hangs_most_clearly() -> None:
    lock: dict[str, Any] = {"on": "lock", "kind": "lock", "doing": "waits for a lock", "line": 3}
    cycle = found(worker(0, thread(1, holder=2, **lock), thread(2, holder=1, **lock)))
    sleeping = found(worker(0, thread(MAIN, line=7, doing="sleeps")))
    moving = found(worker(0, thread(MAIN, line=7, doing="sleeps"), moved=NOW, called=NOW))
    dead = found(worker(0), worker(1, process=Process(alive=False)))
    ranks = [severity(each) for each in (cycle, dead, sleeping, moving)]
    assert ranks == sorted(ranks)
    assert ranks[1] < ranks[2]


def test_a_failed_job_is_described_with_its_error_status_and_duration() -> None:
    failed = worker(0, process=Process(alive=False), phase="left", error="ValueError: bad", began=940.0)
    job = JobState("j", (failed, worker(1, process=Process(alive=False), phase="left", began=940.0)))
    assert list(in_words(analyze(job), 200)) == [
        "job j · 2 workers, 1 failed, 1 left · failed after 60 s: worker0 raised ValueError: bad",
        "worker0    has failed: its process 50 raised ValueError: bad",
        "culprit: worker0 has failed: its process 50 raised ValueError: bad",
    ]
    told = replace(job, end={"status": 1, "ended": 970.0, "failure": "rank 0 raised ValueError: bad"})
    line = next(in_words(analyze(told), 200))
    assert line.endswith("failed with status 1 after 30 s: rank 0 raised ValueError: bad")
    assert told.has_failed
    well = replace(job, workers=job.workers[1:], end={"status": 0, "ended": 952.0, "failure": ""})
    assert list(in_words(analyze(well), 200)) == ["job j · 1 worker, 1 left · succeeded after 12 s"]
    assert not well.has_failed


def test_a_worker_that_is_in_shutdown_is_not_named_beside_one_that_has_failed() -> None:
    report = found(
        worker(0, in_operation("shutdown", 5)), worker(1, thread(MAIN, line=8, doing="waits for a queue"))
    )
    assert not list(waiting_in_words(report, [1]))


def test_a_wait_in_rendezvous_is_not_reported_once_the_group_has_formed() -> None:
    joining = worker(
        0,
        thread(
            MAIN,
            waits=[{"what": "rendezvous", "since": NOW - 9, "details": {"world_size": 2, "present": [0]}}],
        ),
    )
    report = found(joining, worker(1, thread(MAIN, line=7, doing="computes")))
    assert list(waiting_in_words(report, [1])) == ["worker0: MainThread waited 9 s in rendezvous for rank 1"]
    assert not list(waiting_in_words(report, [1], rendezvous=False))


@pytest.mark.parametrize(
    ("threads", "state", "oldest"),
    [
        ([{"waits": [{"what": "shutdown", "since": NOW - 660}]}, {"computes": True}], "computes", 0),
        ([{"waits": [{"what": "shutdown", "since": NOW - 660}]}, {"doing": "sleeps"}], "running", 0),
        ([{"waits": [{"what": "shutdown", "since": NOW - 660}]}], "leaving", 0),
        ([{"waits": [{"what": "barrier", "since": NOW - 9}]}], "waits", 9),
        ([{"waits": [{"what": "barrier", "since": NOW - 9}]}, {"computes": True}], "computes", 9),
        ([{"idle": True}], "running", 0),
        ([{"request": [1, 7], "doing": "waits to enter a with block", "since": NOW - 9}], "waits", 0),
        ([{"request": [1, 7], "doing": "sleeps", "since": NOW - 9}], "running", 0),
        ([{"doing": "waits for an Event", "since": NOW - 9}], "running", 0),
    ],
)
def test_state_of_a_worker_is_that_of_its_busiest_thread(
    threads: list[dict[str, Any]], state: str, oldest: float
) -> None:
    row = row_of(worker(0, *(thread(n + 1, **fields) for n, fields in enumerate(threads))))
    assert (row.state, row.oldest) == (state, oldest)
