"""Workers that start again, that leave first, and that call each other for the first time all at once."""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rpc
from rpc.errors import WorkerLostError
from rpc.options import AgentOptions
from tests.support.workers import RunWorkers, Worker


def call_all() -> list[str]:
    return [rpc.rpc_sync(info, rpc.get_worker_info).name for info in rpc.get_worker_infos()]


# ---- again and again


def start_ten_times(worker: Worker) -> int:
    descriptors = []
    for number in range(10):
        with worker.group():
            assert call_all() == [f"worker{rank}" for rank in range(worker.world_size)]
            rref: rpc.RRef[list[int]] = rpc.remote(
                f"worker{(worker.rank + number) % worker.world_size}", list, args=([number],)
            )
            assert rref.to_here() == [number]
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("farcall")]
    return descriptors[-1] - descriptors[2]


def test_init_after_shutdown_ten_times(run_workers: RunWorkers) -> None:
    """In the same place each time. Nothing stays open but the store, which others may still need."""
    assert max(run_workers(start_ten_times, 3)) <= 7


def serve_store(worker: Worker) -> TCPStore:
    """A store that the kernel picked the port of, served by the first worker."""
    if worker.rank == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        worker.report("port", store.port)
        return store
    return TCPStore("localhost", worker.wait_for("port"), is_master=False)


def join(worker: Worker, store: TCPStore) -> None:
    options = AgentOptions(rendezvous_timeout=30.0)
    rpc.init_with_store(None, store, worker.name, worker.rank, worker.world_size, options)


# ---- the first leaves first


def go_first(worker: Worker) -> None:
    """Serves the store, and takes it along when the process ends."""
    store = serve_store(worker)
    join(worker, store)
    assert len(call_all()) == worker.world_size
    worker.report("ready")
    how = worker.wait_for("go")
    if how == "ungracefully":
        rpc.shutdown(graceful=False)
    elif how == "killed":
        worker.die()


def go_on(worker: Worker) -> list[str]:
    join(worker, serve_store(worker))
    worker.report("ready")
    worker.wait_for("go")
    with pytest.raises(WorkerLostError, match="'worker0'"):
        rpc.rpc_sync("worker0", int)
    others = [info for info in rpc.get_worker_infos() if info.id > 0]
    called = [rpc.rpc_sync(info, rpc.get_worker_info).name for info in others]
    rref = rpc.remote(others[-1], torch.ones, args=(3,))
    assert rref.to_here().sum() == 3
    rpc.barrier([info.name for info in others])
    rpc.shutdown()
    return called


@pytest.mark.parametrize("how", ["ungracefully", "without a word", "killed"])
def test_the_first_worker_leaves_first_with_its_store(run_workers: RunWorkers, how: str) -> None:
    workers = run_workers.start([go_first, go_on, go_on])
    port = workers[0].wait_for("port")
    for worker in list(workers)[1:]:
        worker.tell("port", port)
    workers.wait_for("ready")
    workers[0].tell("go", how)
    workers[0].result()  # its process has ended
    for worker in list(workers)[1:]:
        worker.tell("go")
    assert workers.results()[1:] == [["worker1", "worker2"]] * 2


# ---- all at once


def call_everybody_at_once(worker: Worker, elements: int) -> int:
    """Calls all others from a thread each; every connection is made now, from both ends."""
    with worker.group():
        worker.report("ready")
        worker.wait_for("go")
        tensor = torch.full((elements,), float(worker.rank))
        others = [rank for rank in range(worker.world_size) if rank != worker.rank]

        def call(rank: int) -> int:
            both = rpc.rpc_sync(rank, functools.partial(torch.add, rank), args=(tensor,))
            return int(both.sum()) == elements * (rank + worker.rank)

        with ThreadPoolExecutor(len(others)) as threads:
            return sum(threads.map(call, others))


@pytest.mark.parametrize("elements", [1, 100_000], ids=["small", "large"])
def test_simultaneous_first_calls_between_all_pairs(run_workers: RunWorkers, elements: int) -> None:
    workers = run_workers.start(call_everybody_at_once, 6, args=[elements])
    workers.wait_for("ready")
    workers.tell("go")
    assert workers.results() == [5] * 6
