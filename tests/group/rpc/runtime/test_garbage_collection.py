"""A garbage collection may happen anywhere, also while the agent holds its own locks.

What it finds may be a reference, whose end must be told to the owner, or a tensor that came in a message.
Their finalizers run right there, on a thread that holds a lock, and so must take none.
"""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch

import rpc
from tests.support.finalizers import HookedLock
from tests.support.workers import RunWorkers, Worker, current_worker


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, *contents: Any) -> None:
        self.contents = contents
        self.itself = self


class Meddler(Cycle):
    """Garbage whose destructor makes and drops references, wherever it is found."""

    def __del__(self) -> None:
        rpc.RRef(self.contents)
        rpc.remote("worker1", int)


class Counted:
    """An object whose owner reports each time that the last of all is gone, and how many that makes."""

    lock = threading.RLock()  # its own finalizer may run while it is held
    made = 0
    gone = 0

    def __init__(self) -> None:
        self.tensor = torch.ones(4)
        with Counted.lock:
            Counted.made += 1

    def __del__(self) -> None:
        with Counted.lock:
            Counted.gone += 1
            if Counted.gone == Counted.made:
                current_worker().report("all gone", Counted.gone)

    def read(self) -> torch.Tensor:
        return self.tensor


# ---- anywhere, often


def collect_all_the_time() -> None:
    gc.freeze()  # what there is already need not be looked at again and again
    gc.set_threshold(1, 1, 1)


def make_cycles(number: int) -> float:
    total = 0.0
    for _ in range(30):
        rref = rpc.remote("worker1", Counted)
        total += float(rref.rpc_sync().read().sum())
        Cycle(rref, rref.rpc_async().read(), rpc.remote("worker1", Counted), rref.to_here)
        Cycle(rpc.rpc_sync("worker2", torch.full, args=((8,), number)))
        Meddler()
    return total


def collect_everywhere(worker: Worker) -> list[float]:
    with worker.group():
        if worker.rank > 0:
            return []
        for info in rpc.get_worker_infos():
            rpc.rpc_sync(info, collect_all_the_time)
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(make_cycles, range(4)))


def test_collections_at_every_step_do_no_harm(run_workers: RunWorkers) -> None:
    workers = run_workers.start(collect_everywhere, 3)
    while workers[1].wait_for("all gone") < 4 * 30 * 2:
        pass
    assert workers.results() == [[30 * 4.0] * 4, [], []]


# ---- in every locked section


class Collections:
    """Collections that find some garbage each, as long as there is any."""

    garbage: ClassVar[list[Cycle]] = []
    count = 0

    @classmethod
    def collect(cls) -> None:
        try:
            cls.garbage.pop()
        except IndexError:
            return
        cls.count += 1
        gc.collect()


PACKAGES = ("rpc.", "rref.", "dist_autograd.", "spmd.", "farcall.")


def make_locks_collect() -> None:
    """Each lock that farcall makes from now on collects garbage when it was acquired."""

    def collecting(make: Any) -> Any:
        def make_lock() -> Any:
            by = sys._getframe(1).f_globals["__name__"]
            return HookedLock(make(), Collections.collect) if by.startswith(PACKAGES) else make()

        return make_lock

    threading.Lock = collecting(threading.Lock)
    threading.RLock = collecting(threading.RLock)


def work_with_garbage(worker: Worker) -> int:
    make_locks_collect()
    with worker.group():
        if worker.rank > 0:
            return 0
        gc.freeze()  # so that collections are quick
        tensors = rpc.rpc_sync("worker1", torch.ones, args=((300, 1000),)).unbind()
        Collections.garbage = [Cycle(rpc.remote("worker1", Counted), tensor) for tensor in tensors]
        Collections.garbage[::10] = [Meddler() for _ in Collections.garbage[::10]]
        del tensors
        while Collections.garbage:
            rref = rpc.remote("worker1", Counted)
            assert rref.rpc_sync().read().sum() == 4
            assert rpc.rpc_async("worker1", torch.add, args=(1, 2)).wait() == 3
            rref.to_here()
    return Collections.count


def test_finalizers_may_run_in_every_locked_section(run_workers: RunWorkers) -> None:
    workers = run_workers.start(work_with_garbage, 2)
    while workers[1].wait_for("all gone") < 300:  # some may be gone before others are made
        pass
    assert workers.results() == [300, 0]
