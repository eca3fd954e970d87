"""What waits for what, and why: found in the states of workers, without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.format.layout import Beat
from farcall.observe.reading.figures import row_of
from farcall.observe.reading.state import JobState, Process, WorkerState
from farcall.observe.why.analysis import Report, analyze, severity
from farcall.observe.why.words import in_words, waiting_in_words
from tests.support.effort import PROFILE

NOW = 100.0
MAIN = 1


def place(line: int, function: str = "f") -> list[Any]:
    return [function, "prog.py", line]


def thread(ident: int, name: str = "", **fields: Any) -> dict[str, Any]:
    at = fields.pop("line", None)
    found: dict[str, Any] = {
        "id": ident,
        "name": name or ("MainThread" if ident == MAIN else f"farcall-{ident}"),
    }
    found |= {"since": NOW - 30} | fields
    return found if at is None else found | {"at": place(at), "stack": [place(at)]}


def call(to: int, number: int, what: str = "work") -> dict[str, Any]:
    return {"id": number, "to": f"worker{to}", "incarnation": 10 + to, "what": what, "began": NOW - 20}


def request(by: int, number: int, state: str = "begun", **fields: Any) -> dict[str, Any]:
    return {
        "from": f"worker{by}",
        "incarnation": 10 + by,
        "id": number,
        "state": state,
        "began": NOW - 20,
        **fields,
    }


def worker(
    rank: int,
    *threads: dict[str, Any],
    process: Process | None = None,
    frozen: dict[int, Stack] | None = None,
    wall: float = 1000.0,
    looked: float = NOW,
    phase: str = "running",
    groups: list[dict[str, Any]] | None = None,
    error: str = "",
    began: float = 0.0,
    **snapshot: Any,
) -> WorkerState:
    facts = {
        "error": error,
        "began": began,
        "name": f"worker{rank}",
        "rank": rank,
        "incarnation": 10 + rank,
        "phase": phase,
        "pid": 50 + rank,
    }
    found = {"worker": facts, "threads": list(threads), "moved": NOW - 20, "called": NOW - 20} | snapshot
    found["spmd.node"] = groups or []
    beat = Beat(1, looked, wall, 0, 0, 0.0)
    return WorkerState(beat, found, process or Process(alive=True), NOW, frozen or {})


def found(*workers: WorkerState) -> Report:
    report = analyze(JobState("j", workers))
    for line in in_words(report, 80):
        assert len(line) <= 80, line
    return report


def first(*workers: WorkerState) -> tuple[str, str, int]:
    """Kind, worker and line of the first finding."""
    finding = found(*workers).findings[0]
    at = finding.culprit.place
    return finding.kind, finding.culprit.worker, 0 if at is None else at.line


def waits_for_call(to: int, number: int, line: int) -> dict[str, Any]:
    return thread(MAIN, call=[10 + to, number], line=line)


def in_operation(what: str, line: int, *whom: str, **details: Any) -> dict[str, Any]:
    wait = {"what": what, "since": NOW - 9, "details": details, "whom": list(whom)}
    return thread(MAIN, line=line, waits=[wait])


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


@pytest.mark.parametrize(
    ("doing", "kind"),
    [
        ("sleeps", "sleeps"),
        ("waits for a socket", "socket"),
        ("waits for a subprocess", "subprocess"),
        ("waits for a file", "file"),
        ("waits for an Event", "event"),
        ("waits for a thread to end", "join"),
    ],
)
def test_end_of_a_chain_is_the_culprit(doing: str, kind: str) -> None:
    chain = (
        worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)]),
        worker(
            1, thread(2, line=6, request=[10, 1], call=[12, 1]), calls=[call(2, 1)], requests=[request(0, 1)]
        ),
        worker(2, thread(2, line=7, request=[11, 1], doing=doing), requests=[request(1, 1)]),
    )
    assert first(*chain) == (kind, "worker2", 7)
    assert found(*chain).findings[0].waiting == 2


def test_callee_that_computes() -> None:
    callee = worker(1, thread(2, line=7, request=[10, 1], computes=True), requests=[request(0, 1)])
    assert first(worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)]), callee) == ("computes", "worker1", 7)


@pytest.mark.parametrize(
    ("process", "kind"),
    [
        (Process(alive=False), "dead"),
        (Process(alive=True, stopped=True), "stopped"),
        (Process(alive=True, stopped=True, traced=77), "traced"),
    ],
)
def test_process_that_does_nothing(process: Process, kind: str) -> None:
    caller = worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)])
    assert first(caller, worker(1, thread(MAIN, line=8), process=process)) == (kind, "worker1", 8)


def test_interpreter_that_is_held() -> None:
    frozen = {
        MAIN: Stack(MAIN, (("wait", "<lib>", 3), ("g", "prog.py", 4))),
        2: Stack(2, (("native", "prog.py", 9), ("run", "<ours>", 1))),
    }
    stuck = worker(1, thread(MAIN, line=4, doing="sleeps"), frozen=frozen, looked=NOW - 9)
    assert first(worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)]), stuck) == ("frozen", "worker1", 9)


def test_interpreter_that_is_held_since_before_the_look_after_the_call() -> None:
    frozen = {2: Stack(2, (("native", "prog.py", 9), ("run", "<ours>", 1)))}
    stuck = worker(1, frozen=frozen, looked=NOW - 20)
    report = found(worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1, "native")]), stuck)
    (finding,) = report.findings
    assert (finding.kind, str(finding.culprit.place), finding.waiting) == ("frozen", "prog.py:9", 1)
    assert "runs native for worker0, holds the interpreter lock in C code" in finding.text


def test_call_that_began_after_the_last_look_at_its_callee() -> None:
    gone = Process(alive=False)
    asked = call(1, 1, "native") | {"defined": ["native", "prog.py", 8], "began": NOW - 1.5}
    caller = worker(0, waits_for_call(1, 1, 5), calls=[asked], process=gone)
    callee = worker(1, process=gone, wall=998.0, looked=NOW - 2)
    (finding,) = found(caller, callee).findings
    assert "worker1 last wrote its state 0.5 s before this call" in finding.text
    assert "native is defined at prog.py:8" in finding.text


def test_in_a_job_that_is_over_a_worker_that_died_before_the_others() -> None:
    gone = Process(alive=False)
    early = worker(1, thread(MAIN, line=8), process=gone, wall=990.0)
    late = worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)], process=gone)
    assert first(late, early) == ("dead", "worker1", 8)
    together = worker(1, thread(2, line=9, request=[10, 1], doing="sleeps"), process=gone)
    assert first(late, together) == ("sleeps", "worker1", 9)


def test_link_that_is_down() -> None:
    peer = {"name": "worker1", "incarnation": 11, "state": "BROKEN", "failures": 3}
    report = found(worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)], peers=[peer]), worker(1))
    assert report.findings[0].kind == "link"
    assert "the connection to worker1 is down; 3 attempts" in report.findings[0].text


def test_all_threads_are_busy() -> None:
    busy = [thread(n, line=9, request=[12, n], doing="sleeps") for n in (2, 3)]
    requests = [request(2, 2), request(2, 3), request(0, 1, "queued", ahead=4)]
    report = found(
        worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)]), worker(1, *busy, requests=requests), worker(2)
    )
    assert report.findings[0].kind == "sleeps"
    assert "queued at worker1, behind 4 others: all of its 2 threads are busy" in report.nodes[0].remark


@pytest.mark.parametrize(
    ("state", "words"),
    [("arriving", "arguments are still arriving"), ("begun", "the future that it returned")],
)
def test_call_that_no_thread_runs(state: str, words: str) -> None:
    report = found(
        worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)]), worker(1, requests=[request(0, 1, state)])
    )
    assert words in report.findings[0].text


def test_coroutine_and_what_it_awaits() -> None:
    task = request(0, 1, "awaiting", doing="awaits Event.wait", stack=[place(12, "wait"), place(11, "serve")])
    assert first(worker(0, waits_for_call(1, 1, 5), calls=[call(1, 1)]), worker(1, requests=[task]))[:2] == (
        "awaits",
        "worker1",
    )


def test_barrier_names_who_is_missing() -> None:
    report = found(
        worker(0, in_operation("barrier", 5, "worker2")),
        worker(1, in_operation("barrier", 5, "worker0")),
        worker(2, thread(MAIN, line=8, doing="sleeps")),
    )
    finding = report.findings[0]
    assert (finding.kind, finding.culprit.worker, finding.waiting) == ("sleeps", "worker2", 2)


def test_collective_that_a_rank_has_not_joined() -> None:
    names = ["worker0", "worker1", "worker2"]
    begun = {"name": "g", "number": 5, "operation": "all_reduce"}
    behind = {"name": "g", "number": 4, "operation": "all_reduce"}
    operation = in_operation("all_reduce", 5, group="g", number=5, operation="all_reduce", ranks=names)
    report = found(
        worker(0, operation, groups=[begun]),
        worker(1, thread(MAIN, line=8, doing="sleeps"), groups=[behind]),
        worker(2, operation, groups=[begun]),
    )
    assert report.findings[0].culprit.worker == "worker1"
    assert "waits in all_reduce for worker1" in report.nodes[0].text


def test_collective_that_a_rank_has_joined_with_another_operation() -> None:
    names = ["worker0", "worker1"]
    mine = in_operation("all_reduce", 5, group="g", number=5, operation="all_reduce", ranks=names)
    theirs = in_operation("broadcast", 6, group="g", number=5, operation="broadcast", ranks=names)
    report = found(
        worker(0, mine, groups=[{"name": "g", "number": 5, "operation": "all_reduce"}]),
        worker(1, theirs, groups=[{"name": "g", "number": 5, "operation": "broadcast"}]),
    )
    assert report.findings[0].kind == "cycle"
    assert "worker1 called broadcast" in "\n".join(in_words(report))


def test_shutdown_names_who_is_not_in_it() -> None:
    assert first(
        worker(0, in_operation("shutdown", 5)), worker(1, thread(MAIN, line=8, doing="waits for a queue"))
    ) == ("queue", "worker1", 8)


def test_rendezvous_names_the_ranks_that_lack() -> None:
    waiting = in_operation("rendezvous", 5, world_size=4, present=[0, 2], place="host0:29500")
    report = found(worker(0, waiting, phase="joining"))
    assert report.findings[0].kind == "rendezvous"
    assert "2 of 4 ranks have come to host0:29500; missing: 1, 3" in report.findings[0].text


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
