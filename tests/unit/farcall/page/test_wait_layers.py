"""The graph of waits as boxes and arrows."""

from __future__ import annotations

from typing import Any

from farcall.observe.why.analysis import analyze
from farcall.page.wait_layers import MAX_BOXES, wait_layers
from tests.support.job_states import call, job, main_thread, request, worker


def layers(*workers: Any) -> dict[str, Any]:
    return wait_layers(analyze(job(*workers)))


def test_cycle_is_a_chain_that_an_arrow_closes() -> None:
    lock = {"doing": "waits to enter a with block", "on": "lock", "kind": "_thread.lock", "holder": 1}
    server = {"id": 2, "name": "farcall-1", "since": 70.0, "at": ["g", "prog.py", 9], "stack": []}
    found = layers(
        worker(
            0,
            main_thread(call=[11, 1]),
            server | lock | {"request": [11, 2]},
            calls=[call(1, 1)],
            requests=[request(1, 2)],
        ),
        worker(
            1, server | {"call": [10, 2], "request": [10, 1]}, calls=[call(0, 2)], requests=[request(0, 1)]
        ),
    )
    assert [(each["workers"], each["depth"], each["cycle"]) for each in found["boxes"]] == [
        (["worker0"], 0, True),
        (["worker1"], 1, True),
        (["worker0"], 2, True),
    ]
    assert [(each["from"], each["to"], each["back"], each["cycle"]) for each in found["arrows"]] == [
        (0, 1, False, True),
        (1, 2, False, True),
        (2, 0, True, True),
    ]
    assert found["left_out"] == 0


def test_workers_that_wait_for_the_same_share_a_box() -> None:
    sleeper = main_thread(doing="sleeps (time.sleep)")
    waiting = [worker(n, main_thread(call=[10, n]), calls=[call(0, n)]) for n in range(1, 128)]
    serving = [
        {
            "id": n + 5,
            "name": f"farcall-{n}",
            "since": 70.0,
            "at": ["g", "prog.py", 9],
            "stack": [],
            "request": [10 + n, n],
            "doing": "sleeps",
        }
        for n in range(1, 128)
    ]
    found = layers(worker(0, sleeper, *serving, requests=[request(n, n) for n in range(1, 128)]), *waiting)
    first = found["boxes"][0]
    assert (first["count"], len(first["workers"]), first["depth"]) == (127, 12, 0)
    assert all(box["depth"] == 1 for box in found["boxes"][1:])
    assert found["left_out"] > 0
    assert len(found["boxes"]) == MAX_BOXES


def test_culprit_is_marked_and_has_its_place() -> None:
    found = layers(
        worker(0, main_thread(call=[11, 1]), calls=[call(1, 1)]),
        worker(
            1,
            main_thread(doing="sleeps (time.sleep)", request=[10, 1], function="work"),
            requests=[request(0, 1)],
        ),
    )
    (culprit,) = [box for box in found["boxes"] if box["culprit"]]
    assert (culprit["workers"], culprit["place"], culprit["function"]) == (["worker1"], "prog.py:7", "f")


def test_job_that_waits_for_nothing_has_no_boxes() -> None:
    assert layers(worker(0)) == {"boxes": [], "arrows": [], "left_out": 0}
