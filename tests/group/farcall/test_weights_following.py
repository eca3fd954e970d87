"""Weight stores: futures, callbacks on new versions, tags and metadata."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest
import torch

import rpc
from farcall.observe.metrics.families import families
from farcall.observe.reading.state import JobState, WorkerState
from farcall.observe.reading.stores import lines_of, stores_of
from farcall.weights import Store, WeightsError
from farcall.weights import store as store_module
from farcall.weights.node import node_of
from rpc.errors import RpcError
from rpc.runtime.current import current_agent
from tests.support.workers import RunWorkers, Worker


def whole(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), float(number))}


def test_futures(store: Store) -> None:
    into = whole(0)

    async def wait_and_get() -> list[int]:
        waiting = store.wait_async(newer_than=2)
        first = store.get_async(into, newer_than=1)
        puts = [store.put_async(number, whole(number)) for number in (2, 3)]
        assert [await each for each in puts] == [True, True]
        return [await waiting, await store.get_async(into, version=3), await first]

    store.put(1, whole(1))
    assert asyncio.run(wait_and_get())[:2] == [3, 3]
    assert store.versions() == [2, 3], "puts are made in their order"
    assert store.wait() == 3
    with pytest.raises(TimeoutError, match="no version newer than 3 within 0 s"):
        store.get_async(into, newer_than=3, timeout=0).wait()
    with pytest.raises(WeightsError, match="'step' is int"):
        store.put_async(4, {"step": 4}).wait()
    store.close()
    with pytest.raises(WeightsError, match="is closed: put_async needs an open one"):
        store.put_async(4, whole(4))


def test_callbacks(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    told: queue.Queue[int] = queue.Queue()

    def tell(number: int) -> None:
        told.put(number)
        if number == 2:
            raise LookupError("of the callback")

    store.put(1, whole(1))
    with store.on_new_version(tell):
        for number in (2, 3):
            store.put(number, whole(number))
            assert told.get(timeout=20) == number
    assert "the callback for version 2 of store 'policy' has failed" in caplog.text
    with store.on_new_version(tell, newer_than=1):
        assert told.get(timeout=20) == 3
    with pytest.raises(TypeError, match="callback must be callable"):
        store.on_new_version(3)  # type: ignore[arg-type]


def test_a_subscription_ends_without_a_further_version(store: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr(store_module, "_LOOK_SECONDS", 0.01)
    before = set(threading.enumerate())
    with store.on_new_version(print):
        (thread,) = (each for each in set(threading.enumerate()) - before if "follow" in each.name)
    thread.join(20)
    assert not thread.is_alive()


opened: list[Store] = []


def wait_for_newer(version: int) -> int:
    return opened[-1].wait(newer_than=version)


def test_callees_wait_for_versions_while_their_worker_shuts_down(store: Store) -> None:
    store.put(1, whole(1))
    agent: Any = current_agent()
    leaving = agent.lifecycle.hooks.leaving
    counts = []
    for _ in range(2):
        opened.append(Store("policy", on="worker0"))
        with pytest.raises(TimeoutError):
            opened[-1].wait(newer_than=1, timeout=0.01)
        counts.append(len(leaving))
    assert counts[0] == counts[1], "one hook serves all handles"
    for leave in leaving:
        leave()
    with pytest.raises(RpcError, match="this worker is shutting down"):
        store.wait(newer_than=1)
    waiting = rpc.rpc_async("worker0", wait_for_newer, args=(1,))
    store.put(2, whole(2))
    assert waiting.wait() == 2
    opened.clear()


def test_a_wait_that_is_given_up_before_it_has_come_does_not_keep_a_worker(store: Store) -> None:
    """A shutdown ends a wait that is on its way to the store's worker."""
    agent: Any = current_agent()
    keeper = node_of(agent).stores["worker0", "policy"]
    who = ["reader", 1]
    _, state, _ = keeper.open(None, None, who, 1)
    keeper.give_up(who, 2)
    assert keeper.wait(state, who, 2).done()
    waiting = keeper.wait(state, who, 3)
    assert not waiting.done()
    keeper.give_up(who, 3)
    assert waiting.wait() == state


def test_tags_and_metadata(store: Store) -> None:
    store.put(1, whole(1), metadata={"loss": 0.5, "run": "a"})
    store.tag("best", 1)
    for number in (2, 3, 4):
        store.put(number, whole(number))
    assert store.versions() == [1, 3, 4]
    into = whole(0)
    assert store.get(into, version="best") == 1
    assert torch.equal(into["w"], whole(1)["w"])
    assert store.metadata("best") == {"loss": 0.5, "run": "a"}
    assert store.metadata() == store.metadata(3) == {}
    assert store.usage()["tags"] == {"best": 1}
    later = store.wait_async("last")
    store.tag("last", 4)
    assert later.wait(20) == 4
    store.tag("best", 3)
    assert store.versions() == [3, 4]
    store.tag("best", None)
    with pytest.raises(TimeoutError, match="had no version 'best' within"):
        store.get(into, version="best", timeout=0)
    for call, reason in (
        (lambda: store.tag("best", 1), "store 'policy' has no version 1"),
        (lambda: store.tag("", 3), "a tag is a text"),
        (lambda: store.metadata("best"), "has no version 'best'"),
        (lambda: store.put(5, whole(5), metadata={"x": []}), "metadata is texts, numbers"),
        (lambda: store.put(5, whole(5), metadata={"x": "y" * (1 << 17)}), "65536 bytes at most"),
    ):
        with pytest.raises(WeightsError, match=reason):
            call()


def follow(worker: Worker) -> list[Any]:
    """A wait, and a callback, do not keep a group from ending; a second copy takes over tags and metadata."""
    told: queue.Queue[int] = queue.Queue()
    with worker.group():
        store = Store("policy", on="worker0", copies=2)
        store.on_new_version(told.put, newer_than=0)
        if worker.rank == 0:
            store.put(1, whole(1), metadata={"loss": 1})
            store.tag("best", 1)
        waiting = store.wait_async(newer_than=1)
        seen = [told.get(timeout=20), store.wait("best"), store.metadata(1)]
        rpc.barrier()
    with pytest.raises(RpcError):
        waiting.wait(20)
    return seen


def test_a_group_ends_though_versions_are_waited_for(run_workers: RunWorkers) -> None:
    assert run_workers(follow, 2) == [[1, 1, {"loss": 1}]] * 2


def test_the_observer_sees_versions_and_who_has_them(store: Store) -> None:
    for number in (1, 2):
        store.put(number, whole(number))
    store.put(3, whole(3), part=(0, 2))
    store.tag("best", 1)
    store.get(whole(0))
    agent: Any = current_agent()
    worker = WorkerState(None, {"weights": agent.extensions["weights"].observed(), "worker": {"name": "w"}})
    with store.lease(1):
        leased = WorkerState(None, {"weights": agent.extensions["weights"].observed()})
    (seen,) = stores_of(JobState("job", (worker,)))
    assert [(each.number, each.bytes, each.tags, each.readers) for each in seen.versions] == [
        (1, 64, ["best"], []),
        (2, 64, [], ["worker0"]),
    ]
    assert [each.leases for each in next(stores_of(JobState("job", (leased,)))).versions] == [["worker0"], []]
    first, *versions, missing = lines_of(JobState("job", (worker,)))
    assert first.startswith("weight store 'policy' on w: ")
    assert [each.partition(":")[0] for each in versions] == ["  version 1 (best)", "  version 2"]
    assert missing == "  version 3: part 1 of 2 is missing"
    assert store.usage()["readers"] == {"worker0": 1}
    store.wait()
    assert store.put(2, whole(2)) is True
    store.on_new_version(lambda _: None).close()
    assert store.usage()["readers"] == {"worker0": 1}, "others have read nothing"
    assert store.usage()["ages"].keys() == {1, 2}
    sampled = {
        sample.name: sample.value
        for family in families(JobState("job", (worker,)))
        for sample in family.samples
        if "weights" in sample.name
    }
    assert sampled["farcall_weights_newest_version"] == 2
    assert sampled["farcall_weights_versions"] == 2
    assert sampled["farcall_weights_saved_bytes_total"] == 0
