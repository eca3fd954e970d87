"""Transfers of device tensors over all transports; and those that end early: memory comes back."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import Any

import pytest
import torch

from farcall import rpc
from rpc.errors import MessageLostError, WorkerLostError
from tests.support.cutting import cutting, until_cut
from tests.support.device_groups import LARGE, in_device_group, one_to_one, until_agreed
from tests.support.devices import (
    FIRST,
    KIND,
    Used,
    device_kind,
    is_all,
    late,
    left,
    mode,
    on_devices,
    sleep,
    used,
)
from tests.support.transfers import ACROSS
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]

SMALL = 10_000
NOTHING = Used(0, 0, 0)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def never(tensor: torch.Tensor) -> torch.Tensor:
    sleep(tensor.device)
    time.sleep(60)
    return tensor


def _begin(names: tuple[str, ...] = ("worker1",)) -> list[Any]:
    """Calls that are under way, with tensors that are staged and such as are read in place."""
    return [
        rpc.rpc_async(name, never, args=(late(1.0, size=size),))
        for name in names
        for size in (SMALL, LARGE, LARGE)
    ]


@on_devices
def lose(worker: Worker) -> tuple[list[str], Used]:
    worker.join(**one_to_one(worker), rpc_timeout=40.0)
    if worker.rank == 0:
        until_agreed("worker0", "worker1")
    gc.collect()
    before = used()  # with it the answers are here: a simulated device stops with its process
    worker.report("joined")
    if worker.rank:
        worker.wait_for("never")
    worker.wait_for("all have joined")
    futures = _begin()
    worker.report("under way")
    said = []
    for future in futures:
        try:
            future.wait()
        except RuntimeError as error:
            said.append(type(error).__name__)
    del futures, future
    behind = left(before)
    rpc.shutdown(graceful=False)
    return said, behind


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(False, id="killed"),
        pytest.param(True, id="stopped, then killed", marks=pytest.mark.nightly),
    ],
)
def test_transfers_to_a_worker_that_is_lost_end_and_memory_comes_back(
    run_workers: RunWorkers, device_kind: str, stopped: bool
) -> None:
    workers = run_workers.start(lose, 2, args=("random",), time_limit=60)
    workers.wait_for("joined")
    if stopped:
        workers[1].stop()
    workers[0].tell("all have joined")
    workers[0].wait_for("under way")
    workers[1].kill()
    said, behind = workers[0].result()
    assert said == ["WorkerLostError"] * 3
    assert behind == NOTHING


class Late:
    """Its methods run one after the other."""

    def ones(self) -> torch.Tensor:
        """Ones that the device makes a minute after the answer."""
        sleep(FIRST, times=3000)
        return torch.ones(LARGE, device=FIRST)

    def nothing(self) -> None: ...


@on_devices
def read_what_is_never_made(worker: Worker) -> str:
    worker.join(**one_to_one(worker))
    if worker.rank == 0:
        until_agreed("worker0", "worker1")
    worker.report("joined")
    if worker.rank:
        worker.wait_for("never")
    worker.wait_for("all have joined")
    late = rpc.remote("worker1", Late, concurrency=1)
    made = late.rpc_async().ones()
    late.rpc_sync().nothing()  # the answer before it has arrived
    worker.report("answered")
    worker.wait_for("killed")
    try:
        made.wait()
    except WorkerLostError as error:
        return error.worker
    finally:
        rpc.shutdown(graceful=False)
    return "a value"


def test_a_tensor_that_a_dead_worker_was_to_compute_is_an_error(
    run_workers: RunWorkers, device_kind: str
) -> None:
    workers = run_workers.start(read_what_is_never_made, 2, args=("eager",))
    workers.wait_for("joined")
    workers[0].tell("all have joined")
    workers[0].wait_for("answered")
    workers[1].kill()
    workers[0].tell("killed")
    assert workers[0].result() == "worker1"


_gate = threading.Event()
_entered = threading.Semaphore(0)


def double_later(tensor: torch.Tensor) -> torch.Tensor:
    torch.accelerator.synchronize()
    _entered.release()
    assert _gate.wait(40)
    return tensor * 2


@on_devices
def answer_the_dying(worker: Worker) -> Used:
    worker.join(**one_to_one(worker), rpc_timeout=40.0)
    other = f"worker{1 - worker.rank}"
    until_agreed(worker.name, other)
    worker.report("agreed")
    worker.wait_for("all have agreed")
    left(Used(sys.maxsize, sys.maxsize, 0))  # the other one has what it was sent
    before = used()
    if worker.rank:
        futures = [
            rpc.rpc_async(other, double_later, args=(late(1.0, size=size),)) for size in (SMALL, LARGE, LARGE)
        ]
        worker.wait_for("never")
        del futures
    for _ in range(3):
        assert _entered.acquire(timeout=40)
    worker.report("has been called")
    worker.wait_for("the caller is stopped")
    _gate.set()
    end = time.monotonic() + 10  # large answers are staged if the workers have not agreed by now
    while KIND == "sim" and used().exported_blocks < before.exported_blocks + 2 and time.monotonic() < end:
        time.sleep(0.01)
    worker.report("has answered")
    behind = left(before)
    rpc.shutdown(graceful=False)
    return behind


def test_answers_to_a_caller_that_died_are_given_up(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start(answer_the_dying, 2, args=("random",), time_limit=60)
    workers.wait_for("agreed")
    for worker in workers:
        worker.tell("all have agreed")
    workers[0].wait_for("has been called")
    workers[1].stop()
    workers[0].tell("the caller is stopped")
    workers[0].wait_for("has answered")
    workers[1].kill()
    assert workers[0].result() == NOTHING


@in_device_group(mode="random")
def test_memory_of_cancelled_transfers_comes_back() -> None:
    for _ in range(3):
        rpc.rpc_sync("worker1", double, args=(torch.ones(LARGE, device=FIRST),))
    gc.collect()
    before = used()
    for _ in range(4):
        futures = [
            rpc.rpc_async("worker1", double, args=(late(1.0, size=size),)) for size in (SMALL, LARGE, LARGE)
        ]
        for future in futures:
            future.cancel()
        del futures, future
    assert is_all(rpc.rpc_sync("worker1", double, args=(late(3.0, size=LARGE),)), 6.0)
    assert left(before) == NOTHING


@on_devices
def expire(worker: Worker) -> tuple[list[str], Used]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return [], NOTHING
        for _ in range(3):
            rpc.rpc_sync("worker1", double, args=(torch.ones(LARGE, device=FIRST),))
        gc.collect()
        before = used()  # with it the answers are here: a simulated device stops with its process
        worker.report("agreed")
        worker.wait_for("stopped")
        said = []
        for size in (SMALL, LARGE):
            try:
                rpc.rpc_sync("worker1", double, args=(late(1.0, size=size),), timeout=0.5)
            except RuntimeError as error:
                said.append(type(error).__name__)
        worker.report("expired")
        assert is_all(rpc.rpc_sync("worker1", double, args=(late(3.0, size=LARGE),)), 6.0)
        return said, left(before)


@pytest.mark.nightly
def test_a_worker_that_is_stopped_for_a_while_gives_memory_back(
    run_workers: RunWorkers, device_kind: str
) -> None:
    workers = run_workers.start(expire, 2, args=("random",), time_limit=60)
    workers[0].wait_for("agreed")
    workers[1].stop()
    workers[0].tell("stopped")
    workers[0].wait_for("expired")
    workers[1].resume()
    said, behind = workers[0].result()
    assert said == ["RpcTimeoutError"] * 2
    assert behind == NOTHING


@on_devices
def transfer_while_cut(worker: Worker, elements: int) -> tuple[list[str], Used]:
    with worker.group(**one_to_one(worker), **ACROSS):
        if worker.rank:
            worker.wait_for("over")
            return [], NOTHING
        for size in (SMALL, elements):
            rpc.rpc_sync("worker1", double, args=(torch.ones(size, device=FIRST),))
        gc.collect()
        before = used()
        wrong: list[str] = []
        value = 0.0
        with cutting("worker1", 0.03) as cuts:
            while until_cut(cuts, 10) or not value:
                value += 1.0
                futures = [
                    rpc.rpc_async("worker1", double, args=(torch.full((size,), value, device=FIRST),))
                    for size in (SMALL, elements)
                ]
                for future in futures:
                    try:
                        if not is_all(future.wait(), 2 * value):
                            wrong.append(f"another result of {value}")
                    except MessageLostError:
                        pass  # a large one, whose caller is told
                del futures, future
        behind = left(before)
        worker.report("over")
        return wrong, behind


def test_memory_comes_back_when_connections_are_cut_in_transfers(
    run_workers: RunWorkers, device_kind: str
) -> None:
    workers = run_workers.start(transfer_while_cut, 2, args=("random", 4 * LARGE), time_limit=60)
    workers[0].wait_for("over")
    workers[1].tell("over")
    assert workers[0].result() == ([], NOTHING)
    workers[1].result()
