"""Weight stores with two copies: the second one takes over when the store's worker dies."""

from __future__ import annotations

from typing import Any, cast

import pytest

import rpc
from farcall.weights import Store
from farcall.weights.node import node_of
from rpc.runtime.current import current_agent
from tests.support.streams import until
from tests.support.weights import be_on, holds, rows, same, whole
from tests.support.workers import RunWorkers, Worker


def open_store(keep: int = 2) -> Store:
    return Store("policy", on="worker0", keep=keep, copies=2)


def keep(worker: Worker) -> None:
    worker.join()
    open_store()
    worker.report("ready")
    worker.wait_for("never")


def train(worker: Worker) -> list[Any]:
    worker.join()
    worker.wait_for("open")
    store = open_store()
    seen: list[Any] = [store.put(1, {"w": whole(1)}), store.put(2, {"w": whole(2)})]
    seen += [store.put(3, rows(3, 0), part=(0, 2)), store.usage()["copies"]]
    worker.report("has put")
    worker.wait_for("killed")
    seen.append(store.put(3, rows(3, 1), part=(1, 2)))  # the other part was lost
    seen.append(store.usage()["open"])
    seen.append(store.put(3, rows(3, 0), part=(0, 2)))
    seen += [store.on, store.versions()]
    rpc.shutdown(graceful=False)
    return seen


def read(worker: Worker, *, far: bool) -> list[Any]:
    if far:
        be_on("another host")
    worker.join()
    worker.wait_for("open")
    store = open_store()
    worker.report("open")
    worker.wait_for("read")
    seen: list[Any] = [holds(store, 2)]
    with store.lease(1) as kept:
        worker.report("has read")
        worker.wait_for("wait")
        worker.report("waits")
        seen.append(holds(store, 3, newer_than=2))
        seen.append(same(kept["w"], whole(1)))
    seen.append(holds(store, 2, version=2))
    seen.append(holds(open_store(), 3))  # by the name of the worker that is gone
    seen.append(store.on)
    worker.report("has read")
    worker.wait_for("end")
    rpc.shutdown(graceful=False)
    return seen


@pytest.mark.parametrize("far", [False, True])
def test_another_worker_takes_over(run_workers: RunWorkers, *, far: bool) -> None:
    """The second one to open the store is on the store's host; if the third is not, it gets the copy."""

    def read_there(worker: Worker) -> list[Any]:
        return read(worker, far=far)

    workers = run_workers.start([keep, train, read_there], 3)
    workers[0].wait_for("ready")
    workers[2].tell("open")
    workers[2].wait_for("open")
    workers[1].tell("open")
    workers[1].wait_for("has put")
    workers[2].tell("read")
    workers[2].wait_for("has read")
    workers[2].tell("wait")
    workers[2].wait_for("waits")
    workers[0].kill()
    workers[1].tell("killed")
    workers[2].wait_for("has read")
    on = "worker2"
    assert workers[1].result() == [
        True,
        True,
        False,
        2,
        False,
        {3: "part 0 of 2 is missing"},
        True,
        on,
        [2, 3],
    ]
    workers[2].tell("end")  # later, since the last put waits for the second copy
    assert workers[2].result() == [True, True, True, True, True, on]


def stay(worker: Worker, *, far: bool = False, put: bool = False) -> None:
    """Open the store, and say on request which worker has it and what is read."""
    if far:
        be_on("another host")
    worker.join(dynamic=True)
    store = open_store(keep=1)
    if put:
        assert store.put(7, {"w": whole(7)})
    until(lambda: store.usage()["copies"] == 2 or worker.rank == 0)
    worker.report("open")
    kept = node_of(cast("Any", current_agent())).kept
    while True:
        worker.wait_for("look")
        right = holds(store, 7)
        until(lambda: store.usage()["copies"] == 2 or worker.name == store.on)
        # A copy ends once another worker has taken the store over.
        until(lambda: sum(bool(each.versions()) for each in list(kept.values())) <= 1)
        worker.report("sees", [store.on, right])


def test_copies_follow_one_another(run_workers: RunWorkers) -> None:
    """A copy on another host replaces one on the store's; each keeper dies; the first one comes again."""

    def put(worker: Worker) -> None:
        stay(worker, put=True)

    def look_far(worker: Worker) -> None:
        stay(worker, far=True)

    workers = run_workers.start([stay], 1)
    workers[0].wait_for("open")
    others = []
    for name, task in (("near", put), ("far", look_far), ("last", stay)):
        others.append(workers.add(task, name=name))
        others[-1].wait_for("open")
    near, far, last = others

    def sees(worker: Any) -> Any:
        worker.tell("look")
        return worker.wait_for("sees")

    workers[0].kill()
    assert sees(last) == ["far", True]
    far.kill()
    assert sees(near) == ["last", True], "though it has not called the second worker"
    again = workers.add(stay, name="worker0", rank=0)
    again.wait_for("open")
    assert sees(again) == ["last", True]
    last.kill()
    assert sees(near) == sees(again) == ["near", True]
    near.kill()
    assert sees(again) == ["worker0", True], "the store is on its first worker once more"
    later = workers.add(stay, name="later")
    later.wait_for("open")
    assert sees(later) == ["worker0", True]
    for worker in (later, again):
        worker.kill()
