"""Weight stores: deaths of writers, readers, the process with a host's copy, and the store's worker."""

from __future__ import annotations

from typing import Any, cast

import pytest

import rpc
from farcall.weights import Store
from farcall.weights import handle as handle_module
from farcall.weights.node import node_of
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from tests.support.streams import until
from tests.support.weights import be_on, empty, holds, rows, same, whole
from tests.support.workers import RunWorkers, Worker, current_worker


def stop_in_put(*_: Any) -> Any:
    """Takes the place of a handle's method that returns the memory to write to."""
    current_worker().report("begun")
    current_worker().wait_for("never")


def die_in_put(worker: Worker) -> None:
    worker.join()
    worker.wait_for("go")
    setattr(handle_module.Handle, "mapped", stop_in_put)  # noqa: B010  # mypy knows another type
    Store("policy", on="worker0").put(2, rows(2, 1), part=(1, 2))


def die_with_lease(worker: Worker) -> None:
    worker.join()
    worker.wait_for("go")
    with Store("policy", on="worker0").lease(1):
        worker.report("begun")
        worker.wait_for("never")


def outlive_others(worker: Worker) -> list[Any]:
    """Keep a store while a writer and a reader die."""
    worker.join()
    store = Store("policy", on="worker0", keep=1)
    store.put(1, {"w": whole(1)})
    assert store.put(2, rows(2, 0), part=(0, 2)) is False
    worker.report("ready")
    worker.wait_for("killed")
    until(lambda: not store.usage()["leases"])
    until(lambda: "is lost" in store.usage()["open"][2])
    told = store.usage()["open"][2]
    with pytest.raises(TimeoutError, match="worker 'worker1', which was to write part 1, is lost"):
        store.get({"w": empty()}, newer_than=1, timeout=0)
    assert holds(store, 1)
    assert store.put(2, rows(2, 1), part=(1, 2)) is True
    assert holds(store, 2)
    size = store.usage()["bytes"]
    rpc.shutdown(graceful=False)
    return [told, size]


def test_writers_and_readers_may_die(run_workers: RunWorkers) -> None:
    workers = run_workers.start([outlive_others, die_in_put, die_with_lease], 3)
    workers[0].wait_for("ready")
    for worker in (workers[1], workers[2]):
        worker.tell("go")
        worker.wait_for("begun")
        worker.kill()
    workers[0].tell("killed")
    told, size = workers[0].result()
    assert told == "part 1 of 2 is missing (worker 'worker1', which was to write part 1, is lost)"
    assert size == 2 * 128, "that of the versions that are kept, and of one more"


def keep_and_die(worker: Worker) -> None:
    worker.join()
    Store("policy", on="worker0").put(1, {"w": whole(1)})
    worker.report("ready")
    worker.wait_for("never")


def read_from_the_dead(worker: Worker) -> str:
    worker.join()
    store = Store("policy", on="worker0")
    into = {"w": empty()}
    store.get(into)
    with store.lease() as kept:
        worker.report("reading")
        with pytest.raises(WorkerLostError, match="store 'policy' is gone with worker 'worker0'") as caught:
            store.get(into, newer_than=1)
        assert same(kept["w"], whole(1))
    assert same(into["w"], whole(1))
    with pytest.raises(WorkerLostError):
        Store("policy", on="worker0", copies=2)
    rpc.shutdown(graceful=False)
    return caught.value.worker


def test_the_death_of_the_keeper_is_told(run_workers: RunWorkers) -> None:
    workers = run_workers.start([keep_and_die, read_from_the_dead], 2)
    workers[0].wait_for("ready")
    workers[1].wait_for("reading")
    workers[0].kill()
    assert workers[1].result() == "worker0"


def lose_the_copy(worker: Worker) -> None:
    be_on("another host")
    worker.join()
    store = Store("policy", on="worker0")
    into = {"w": empty()}
    store.get(into)
    kept = node_of(cast("Any", current_agent())).kept
    assert len(kept) == 1, "this process keeps its host's copy"
    worker.report("reading")
    until(lambda: not kept)
    with pytest.raises(WorkerLostError):
        store.get(into)
    assert same(into["w"], whole(1))
    rpc.shutdown(graceful=False)


def test_copies_of_hosts_end_with_the_worker_of_their_store(run_workers: RunWorkers) -> None:
    workers = run_workers.start([keep_and_die, lose_the_copy], 2)
    workers[0].wait_for("ready")
    workers[1].wait_for("reading")
    workers[0].kill()
    workers[1].result()


def read_twice_far(worker: Worker) -> bool:
    be_on("another host")
    worker.join()
    store = Store("policy", on="worker0")
    worker.wait_for("go on")
    assert holds(store, 1)
    worker.report("has read")
    worker.wait_for("go on")
    found = holds(store, 1)
    rpc.shutdown(graceful=False)
    return found


def test_another_process_keeps_the_copy_of_a_host_if_one_dies(run_workers: RunWorkers) -> None:
    workers = run_workers.start([keep_and_die, read_twice_far, read_twice_far], 3)
    workers[0].wait_for("ready")
    for rank in (1, 2):  # the first one keeps the copy
        workers[rank].tell("go on")
        workers[rank].wait_for("has read")
    workers[1].kill()
    workers[2].tell("go on")
    assert workers[2].result() is True
    workers[0].kill()
