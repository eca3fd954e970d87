"""Calls and locks that wait for each other."""

from __future__ import annotations

import threading

import rpc
from tests.support.hangs.hang import from_worker0, hang
from tests.support.workers import Worker

LOCK = threading.Lock()
OTHER = threading.Lock()
BOTH_HOLD_ONE = threading.Barrier(2)


def block() -> None:
    with LOCK:  # culprit: cycle_of_calls_and_a_lock
        pass


def call_back() -> None:
    rpc.rpc_sync("worker0", block, timeout=0)


@hang("cycle", worker="worker0")
def cycle_of_calls_and_a_lock(worker: Worker) -> None:
    if worker.rank == 0:
        with LOCK:
            rpc.rpc_sync("worker1", call_back, timeout=0)


def first_then_second() -> None:
    with LOCK:
        BOTH_HOLD_ONE.wait()
        with OTHER:  # culprit: two_locks_in_different_order
            pass


def second_then_first() -> None:
    with OTHER:
        BOTH_HOLD_ONE.wait()
        with LOCK:
            pass


@hang("cycle")
def two_locks_in_different_order(worker: Worker) -> None:
    if worker.rank == 0:
        calls = [rpc.rpc_async("worker1", each, timeout=0) for each in (first_then_second, second_then_first)]
        for call in calls:
            call.wait()


def lock_twice() -> None:
    with LOCK, LOCK:  # culprit: lock_taken_twice
        pass


@hang("cycle")
def lock_taken_twice(worker: Worker) -> None:
    from_worker0(worker, lock_twice)


def forward(hops: int) -> None:
    me = int(rpc.get_worker_info().name.removeprefix("worker"))
    if hops:
        rpc.rpc_sync(f"worker{(me + 1) % 3}", forward, args=(hops - 1,), timeout=0)
    else:
        with LOCK:  # culprit: cycle_through_three_workers
            pass


@hang("cycle", worker="worker0", size=3)
def cycle_through_three_workers(worker: Worker) -> None:
    if worker.rank == 0:
        with LOCK:
            rpc.rpc_sync("worker1", forward, args=(2,), timeout=0)
