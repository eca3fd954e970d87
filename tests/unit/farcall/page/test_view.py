"""What the page shows of a job at one moment."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.observe.reading.figures import job_lines
from farcall.observe.reading.gathered import pack_states, unpack_states
from farcall.observe.reading.state import JobState, Process, WorkerState, with_methods
from farcall.observe.why.analysis import analyze
from farcall.page.view import job_view, past_job, point_of
from farcall.page.worker_view import worker_view
from tests.support.effort import PROFILE
from tests.support.job_states import NOW, call, job, main_thread, request, worker


def view(*workers: WorkerState, earlier: JobState | None = None) -> dict[str, Any]:
    found = job_view(job(*workers), analyze(job(*workers)), earlier)
    json.dumps(found)
    return found


def part(name: str, value: Any) -> dict[str, Any]:
    """What an extension has left in a snapshot."""
    return {name: value}


def test_calls_in_flight_are_edges_between_workers() -> None:
    calls = [call(1, 1, "a"), call(1, 2, "b", began=NOW - 50), call(1, 3, "a"), call(9, 4)]
    found = view(worker(0, calls=calls), worker(1))
    assert found["edges"] == [{"from": 0, "to": 1, "count": 3, "oldest": 50.0, "what": ["a", "b"]}]


def test_edges_of_a_worker_that_is_dead_are_gone() -> None:
    found = view(worker(0, process=Process(alive=False), calls=[call(1, 1)]), worker(1))
    assert found["edges"] == []
    assert [each["state"] for each in found["workers"]] == ["dead", "running"]
    assert (found["job"]["dead"], found["job"]["living"]) == (1, 1)


def test_most_edges_are_drawn_where_there_are_too_many() -> None:
    many = [worker(n, calls=[call(to, to) for to in range(40)]) for n in range(40)]
    found = view(*many)
    assert (len(found["edges"]), found["edges_left_out"]) == (600, 1000)


def test_connection_that_is_made_again_is_a_link() -> None:
    peers = [{"name": "worker1", "state": "BROKEN"}, {"name": "worker2", "state": "ESTABLISHED"}]
    found = view(worker(0, peers=peers), worker(1), worker(2))
    assert found["links"] == [{"from": 0, "to": 1, "state": "BROKEN"}]


def test_peers_with_names_that_are_no_text_are_no_links() -> None:
    assert view(worker(0, peers=[{"name": ["worker1"], "state": "BROKEN"}]), worker(1))["links"] == []


def test_edges_lead_to_workers_that_are_shown() -> None:
    found = view(worker(0, calls=[call(1024, 1), call(1023, 2)]), *(worker(n) for n in range(1, 1025)))
    assert [each["to"] for each in found["edges"]] == [1023]
    assert len(found["workers"]) == 1024


def test_rates_are_those_since_the_look_before() -> None:
    before = job(worker(0))
    found = view(worker(0, at=2.0), earlier=before)
    assert (found["workers"][0]["calls"], found["workers"][0]["share"]) == (10.0, 0.5)
    assert point_of(found["workers"])[0] == 10.0


def test_headline_says_for_how_long_nothing_moved() -> None:
    found = view(worker(0, main_thread(doing="sleeps")))
    assert found["job"]["state"] == "still"
    assert found["job"]["headline"] == "1 worker · nothing has moved for 30 s"


def test_references_have_their_holders() -> None:
    owned = {"creator": 11, "number": 4, "state": "OWNED", "type": "Shard", "holders": [[11, 2], [99, 1]]}
    owned["bytes"] = 4096
    found = view(worker(0, rref={"objects": 3, "owned": [owned]}), worker(1))
    (shown,) = found["references"]["objects"]
    assert (shown["owner"], shown["id"], shown["type"]) == ("worker0", "worker1 #4", "Shard")
    assert shown["bytes"] == 4096
    assert shown["holders"] == [["a worker that is gone (63)", 1], ["worker1", 2]]
    assert found["references"]["left_out"] == 2


def test_ranks_that_are_behind_are_named() -> None:
    groups = [[{"name": "world", "number": n, "operation": "barrier()"}] for n in (5, 5, 4)]
    found = view(*(worker(n, **part("spmd.node", group)) for n, group in enumerate(groups)))
    (group,) = found["collectives"]["groups"]
    assert (group["furthest"], group["behind"]) == (5, ["worker2"])


def test_operations_of_groups_have_bytes_and_seconds() -> None:
    done = [{"name": "all_reduce(4)", "started": 1.0, "ended": 1.5, "bytes": 400}] * 2
    running = {"name": "all_reduce(4)", "started": 2.0, "ended": 0.0, "bytes": 400}
    found = view(worker(0, **part("spmd.collectives", [*done, running])))
    (shown,) = found["collectives"]["operations"]
    assert (shown["count"], shown["running"], shown["bytes"], shown["seconds"]) == (2, 1, 800, 1.0)


def test_driver_of_spmd_mode_has_layouts_and_what_was_moved() -> None:
    layout = {"dtype": "float32", "shape": [8, 4], "mesh": [2], "placements": ["Shard(dim=0)"], "count": 3}
    moved = {"operator": "aten::cat", "where": "prog.py:7 in f", "note": "whole", "count": 2, "bytes": 64}
    session = {
        "workers": 2,
        "counts": {"programs": 9},
        "layouts": [layout | {"bytes": 384}],
        "moved": [moved],
    }
    (shown,) = view(worker(0, **part("spmd.session", session)))["spmd"]
    assert (shown["driver"], shown["workers"], shown["counts"]) == ("worker0", 2, {"programs": 9})
    assert shown["layouts"] == [layout | {"bytes": 384}]
    assert shown["moved"] == [moved]


def test_worker_has_its_stacks_and_calls() -> None:
    state = job(worker(0, main_thread(doing="sleeps"), calls=[call(1, 1)], requests=[request(1, 2)]))
    found = worker_view(analyze(state), "worker0")
    assert found is not None
    assert found["threads"][0] == {
        "name": "MainThread",
        "idle": False,
        "doing": "sleeps",
        "stack": [["f", "prog.py", 7]],
    }
    assert found["calls"] == [{"to": "worker1", "what": "work", "seconds": 20.0}]
    assert found["requests"] == [{"from": "worker1", "state": "begun", "seconds": 20.0}]
    assert worker_view(analyze(state), "nobody") is None


def test_threads_are_described_in_the_words_of_why() -> None:
    runs = main_thread(request=[11, 2], function="block", doing="waits for a lock", on="lock")
    idle = {"id": 2, "name": "farcall-1", "idle": True, "stack": []}
    state = job(worker(0, runs | {"kind": "_thread.lock"}, idle), worker(1, main_thread(call=[10, 2])))
    found = [worker_view(analyze(state), f"worker{n}") for n in range(2)]
    texts = [[each["doing"] for each in shown["threads"]] for shown in found if shown is not None]
    assert texts == [["runs block, waits for the lock `lock`", ""], ["waits for worker0: a call"]]


def test_thread_that_runs_a_function_is_said_to_run_it_once() -> None:
    state = job(worker(0, main_thread(request=[11, 2], function="load", on="random", kind="module")))
    (finding,) = analyze(state).findings
    assert finding.text == "worker0 MainThread runs load, at prog.py:7 in f"


def test_memory_of_a_worker_is_told_apart() -> None:
    parts: dict[str, Any] = {
        "counters": {"memory": [4096, 1024, 0, 0], "send_queue": 7},
        "autograd": {"contexts": 2},
    }
    (found,) = view(worker(0, rref={"objects": 3}, **parts))["workers"]
    shown = {name: found[name] for name in ("shared", "lent", "unsent", "objects", "contexts")}
    assert shown == {"shared": 4096, "lent": 1024, "unsent": 7, "objects": 3, "contexts": 2}


def test_history_has_what_was_found_of_jobs_that_did_not_go_on() -> None:
    hung = past_job(analyze(job(worker(0, main_thread(doing="sleeps")))))
    moving = past_job(analyze(job(worker(0, main_thread(doing="sleeps"), moved=NOW, called=NOW))))
    assert hung is not None
    assert moving is not None
    assert (hung.state, hung.why) == ("running", "note: worker0 MainThread sleeps, at prog.py:7 in f")
    assert (moving.state, moving.why, moving.workers) == ("running", "", 1)
    assert past_job(analyze(job())) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_times_that_are_not_finite_are_none(wrong: float) -> None:
    state = worker(
        0, main_thread(), calls=[call(1, 1, began=wrong)], requests=[request(1, 2) | {"began": wrong}]
    )
    found = view(replace(state, snapshot=dict(state.snapshot) | {"moved": wrong, "called": wrong}), worker(1))
    json.dumps(found, allow_nan=False)
    assert found["edges"][0]["oldest"] == 0.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e300])
def test_state_of_another_host_has_finite_numbers(wrong: float) -> None:
    state = worker(0)
    assert state.beat is not None
    snapshot = dict(state.snapshot) | {"worker": {"name": "worker0", "began": wrong}}
    state = replace(
        state, beat=replace(state.beat, wall=math.nan), snapshot=snapshot, process=Process(share=math.nan)
    )
    (found,) = unpack_states(pack_states(job(state)), 0.0, "a file")
    assert found.beat is None
    assert found.process.share == 0.0
    assert "job 7c2f" in job_lines(job(found), 80)[0]


def test_a_long_error_of_a_job_is_shown_within_the_width_of_the_terminal() -> None:
    dead = replace(worker(0), process=Process(alive=False))
    failed = replace(job(dead), end={"status": 1, "failure": "word " * 60})
    lines = job_lines(failed, 80)
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines).count("word") == 60


def _state(elastic: dict[str, Any]) -> dict[str, Any]:
    return {"spmd.elastic": elastic}


def test_elastic_job_is_described_by_the_worker_that_is_furthest() -> None:
    ahead: dict[str, Any] = {
        "view": 4,
        "step": 120,
        "members": ["a", "b"],
        "losses": 2,
        "lost": "c",
        "took": 0.314,
    }
    behind: dict[str, Any] = {
        "view": 4,
        "step": 119,
        "members": ["a", "b"],
        "losses": 0,
        "lost": "",
        "took": 0.0,
    }
    text = "step 120, view 4 of 2, 2 lost (the last, c, for 0.31 s)"
    state = job(worker(0, main_thread(), **_state(behind)), worker(1, **_state(ahead)))
    assert " ".join(job_lines(state, 1000)).endswith(f" · {text}")
    found = view(worker(0, main_thread(), **_state(ahead)))
    assert found["job"]["headline"].endswith(f" · {text}")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PARTS = (
    *("rref", "spmd.elastic", "spmd.node", "spmd.collectives", "spmd.session"),
    *("executor", "peers", "calls", "requests"),
)


@PROFILE
@given(st.dictionaries(st.sampled_from(PARTS), VALUES, max_size=4))
def test_whatever_a_file_holds_the_page_shows_something(parts: dict[str, Any]) -> None:
    assert view(worker(0, main_thread(), **parts))["workers"][0]["name"] == "worker0"


def test_calls_of_methods_are_described_as_their_callee_does() -> None:
    caller = worker(0, calls=[call(1, 5, "method 'pull' of an object"), call(1, 6, "work")])
    callee = worker(1, requests=[request(0, 5) | {"what": "Server.pull"}, request(0, 6)])
    described, _ = with_methods([caller, callee])
    assert [each["what"] for each in described.calls] == ["Server.pull", "work"]


def test_short_calls_of_methods_are_described_by_what_the_owner_tells_of_the_object() -> None:
    own = {"creator": 101, "number": 3, "type": "Server", "holders": []}
    owner = worker(1, rref={"objects": 1, "owned": [own]})
    own["creator"] = owner.incarnation
    texts = [f"method 'pull' of object {owner.name} #{number}" for number in (3, 4)]
    caller = worker(0, calls=[call(1, number, text) for number, text in enumerate(texts)])
    described, _ = with_methods([caller, owner])
    assert [each["what"] for each in described.calls] == ["Server.pull", texts[1]]
