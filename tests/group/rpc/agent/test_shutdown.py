"""``shutdown``: who waits for what, and what becomes of calls under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import NotInitializedError, RpcError, RRefError, WorkerLostError
from tests.support.serving import Gate, in_group, open_gate, wait_at_gate
from tests.support.workers import RunWorkers, Worker, current_worker

# ---- graceful: all work everywhere is done first


def relay(hops: int) -> None:
    """Passes on to the next worker without waiting; the last one reports."""
    worker = current_worker()
    if hops == 0:
        worker.report("arrived")
    else:
        rpc.rpc_async((worker.rank + 1) % worker.world_size, relay, args=(hops - 1,))


async def relay_in_coroutine(hops: int) -> None:
    relay(hops)


@rpc.functions.async_execution
def relay_in_callback(hops: int) -> torch.futures.Future[None]:
    return rpc.rpc_async(rpc.get_worker_info(), int).then(lambda _: relay(hops))


def relay_through_reference(hops: int) -> None:
    worker = current_worker()
    rpc.remote((worker.rank + 1) % worker.world_size, relay, args=(hops - 1,))


@pytest.mark.parametrize(
    "begin", [relay, relay_in_coroutine, relay_in_callback, relay_through_reference], ids=lambda f: f.__name__
)
def test_nobody_leaves_while_calls_cause_calls(run_workers: RunWorkers, begin: Callable[[int], Any]) -> None:
    def start_chains(worker: Worker) -> None:
        if worker.rank == 0:
            for _ in range(5):
                rpc.rpc_async("worker1", begin, args=(30,))  # the 30th hop leads back to worker1

    workers = run_workers.start(in_group(start_chains), 3)
    for _ in range(5):
        workers[1].wait_for("arrived")
    workers.results()


def shut_down_early(worker: Worker) -> None:
    worker.join()
    worker.report("joined")
    if worker.rank == 1:
        worker.wait_for("go")
        for _ in range(3):
            assert rpc.rpc_sync("worker0", torch.add, args=(1, 1)) == 2  # it is in shutdown, and serves
    rpc.shutdown()
    worker.report("left")


def test_who_is_in_shutdown_serves_until_all_are(run_workers: RunWorkers) -> None:
    workers = run_workers.start(shut_down_early, 2)
    workers.wait_for("joined")
    workers[1].tell("go")
    workers.wait_for("left")
    workers.results()


# ---- ungraceful: now


closed = Gate()


def hold_until_closed() -> None:
    current_worker().report("holding")
    closed.wait()


def leave_at_once(worker: Worker) -> list[str]:
    worker.join()
    future = rpc.rpc_async("worker1", wait_at_gate)
    rref = rpc.remote("worker1", wait_at_gate)
    worker.wait_for("go")
    rpc.shutdown(graceful=False)
    ended = []
    for wait in (future.wait, rref.to_here):
        with pytest.raises(RpcError, match="shut down") as caught:
            wait()
        ended.append(type(caught.value).__name__)
    closed.open()
    return ended


def call_who_leaves(worker: Worker) -> list[str]:
    worker.join()
    held = rpc.rpc_async("worker0", hold_until_closed)
    worker.report("called")
    reasons = []
    waits: tuple[Callable[[], object], ...] = (held.wait, lambda: rpc.rpc_sync("worker0", int))
    for wait in waits:
        with pytest.raises(WorkerLostError, match=r"'worker0'.*has shut down without waiting") as caught:
            wait()
        reasons.append(caught.value.worker)
    open_gate()
    rpc.shutdown(graceful=False)
    return reasons


def test_an_ungraceful_shutdown_leaves_at_once(run_workers: RunWorkers) -> None:
    workers = run_workers.start([leave_at_once, call_who_leaves])
    workers[1].wait_for("called")
    assert [workers[1].wait_for("at the gate") for _ in range(2)] == ["", ""]
    workers[0].wait_for("holding")
    workers[0].tell("go")
    assert workers.results() == [["NotInitializedError", "RRefError"], ["worker0"] * 2]


def end_without_shutdown(worker: Worker) -> None:
    worker.join()
    worker.wait_for("go")


def wait_for_who_ends(worker: Worker) -> str:
    worker.join()
    held = rpc.rpc_async("worker0", hold_until_closed)
    with pytest.raises(WorkerLostError) as caught:
        held.wait()
    rpc.shutdown()
    return caught.value.reason


def test_a_process_that_ends_says_goodbye(run_workers: RunWorkers) -> None:
    workers = run_workers.start([end_without_shutdown, wait_for_who_ends])
    workers[0].wait_for("holding")
    workers[0].tell("go")
    assert workers.results()[1] == "its process ended without shutdown()"


# ---- what is left


def leak(worker: Worker) -> str:
    worker.join()
    rref: rpc.RRef[list[Any]] | None = rpc.remote("worker1", list) if worker.rank == 0 else None
    rpc.barrier()
    if worker.rank == 0:
        rpc.shutdown(release_references=False)
        assert rref is not None
        return "left"
    with pytest.raises(RRefError, match="other workers still refer to objects of 'worker1'"):
        rpc.shutdown(raise_on_leaks=True)
    with pytest.raises(NotInitializedError):
        rpc.shutdown()
    return "leaking"


def test_leaks_are_reported_to_who_asks(run_workers: RunWorkers) -> None:
    assert run_workers(leak, 2) == ["left", "leaking"]
