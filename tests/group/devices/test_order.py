"""Order on devices beyond one call: objects that several requests use, memory that is freed, and deaths."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor

from farcall import rpc
from tests.support.device_groups import one_to_one
from tests.support.devices import FIRST, SIZE, device_kind, is_all, late, mode, on_devices, sleep, used_bytes
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]


class Counter:
    """Changes a tensor in place."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SIZE, device=FIRST)

    def add(self, value: float) -> None:
        sleep(FIRST)
        self.tensor.add_(value)

    def get(self) -> Tensor:
        return self.tensor * 1

    def add_and_look(self, value: float, this: rpc.RRef[Counter]) -> Look:
        self.add(value)
        return Look(this)


class Look:
    """Arrives as what another request sees of a counter, before the one that returns it is answered."""

    def __init__(self, counter: rpc.RRef[Counter]) -> None:
        self.counter = counter

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (is_all(self.counter.rpc_sync().get(), 9.0),)


@on_devices
def count_on_one_object(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        counter = rpc.remote("worker1", Counter)
        found = []
        for step in range(1, 4):
            counter.rpc_sync().add(1.0)
            found.append(is_all(counter.rpc_sync().get(), float(step)))
        found.append(bool(counter.rpc_sync().add_and_look(6.0, counter)))
        mine = rpc.RRef(Counter())
        mine.rpc_sync().add(5.0)
        found.append(is_all(mine.local_value().get(), 5.0))
        return found


def test_requests_on_one_object_follow_each_other(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(count_on_one_object, 2, args=(mode,), time_limit=60)[0] == [True] * 5


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


@on_devices
def free_early(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
        for _ in range(3):
            stream = torch.Stream(device=FIRST)
            with stream:
                sent = late(2.0)
                future = rpc.rpc_async("worker1", _sum, args=([sent, sent * 2],))
                del sent
                again = [torch.full((SIZE,), 9.0, device=FIRST) for _ in range(4)]
            with torch.Stream(device=FIRST):
                sleep(FIRST)
                doubled = future.wait() * 2
                del future
            torch.full((SIZE,), 7.0, device=FIRST)
            with stream:
                found.append(is_all(again[0], 9.0))
            torch.accelerator.synchronize(0)
            found.append(is_all(doubled, 12.0))
        return found


def test_memory_is_kept_until_it_is_used(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(free_early, 2, args=(mode,), time_limit=60)[0] == [True] * 6


@on_devices
def free_before_the_copy(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
        for _ in range(3):
            sent = torch.full((SIZE,), 2.0, device=FIRST)
            torch.accelerator.synchronize(0)
            for _ in range(32):  # all streams of PyTorch's pool: also that on which the copy is made
                with torch.Stream(device=FIRST):
                    sleep(FIRST)
            future = rpc.rpc_async("worker1", _sum, args=([sent, sent],))
            del sent
            again = [torch.full((SIZE,), 9.0, device=FIRST) for _ in range(4)]
            torch.accelerator.current_stream().synchronize()
            found.append(is_all(future.wait(), 4.0))
            del again
        return found


def test_memory_is_kept_until_it_is_copied(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(free_before_the_copy, 2, args=(mode,), time_limit=60)[0] == [True] * 3


@on_devices
def call_the_dying(worker: Worker) -> list[str]:
    worker.join(**one_to_one(worker), rpc_timeout=20.0)
    if worker.rank:
        worker.report("ready")
        time.sleep(60)
    worker.report("ready")
    worker.wait_for("killed")
    before = used_bytes()
    found = []
    try:
        rpc.rpc_sync("worker1", _sum, args=([late(2.0), late(3.0)],))
    except RuntimeError as error:
        found.append(type(error).__name__)
    rpc.shutdown(graceful=False)
    gc.collect()  # the frames of the error had the arguments
    found.append(str(used_bytes() <= before))
    return found


def test_memory_for_a_worker_that_died_comes_back(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start(call_the_dying, 2, args=("random",))
    workers.wait_for("ready")
    workers[1].kill()
    workers[0].tell("killed")
    assert workers[0].result() == ["WorkerLostError", "True"]
