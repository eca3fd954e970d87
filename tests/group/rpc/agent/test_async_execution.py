"""``functions.async_execution``: functions that return a future and are answered when it is completed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import RpcError
from tests.support.serving import first_of, in_standing_group
from tests.support.workers import RunWorkers, Worker

Int = torch.futures.Future[int]


def completed_elsewhere(value: int) -> Int:
    """A future that another thread completes, after this function has returned."""
    future: Int = torch.futures.Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


class Remote:
    """Methods that are marked outside of the decorator which makes them static, or of the class."""

    @rpc.functions.async_execution
    @staticmethod
    def static(x: int) -> Int:
        return completed_elsewhere(x + 3)

    @rpc.functions.async_execution
    @classmethod
    def of_class(cls, x: int) -> Int:
        return completed_elsewhere(x + 2 * len(cls.__name__))


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
@in_standing_group()
def test_static_and_class_methods_can_be_marked_outside(owner: str) -> None:
    rref = rpc.remote(owner, Remote)
    for name, value in (("static", 4), ("of_class", 13)):
        marked: Callable[..., Any] = getattr(Remote, name)
        assert [
            rpc.rpc_sync(owner, marked, args=(1,)),
            rpc.remote(owner, marked, args=(1,)).to_here(),
            getattr(rref.rpc_sync(), name)(1),
            getattr(rref.rpc_async(), name)(1).wait(),
            getattr(rref.remote(), name)(1).to_here(),
        ] == [value] * 5


@in_standing_group()
def test_a_function_can_be_marked_when_it_is_sent() -> None:
    assert rpc.rpc_sync("worker1", rpc.functions.async_execution(completed_elsewhere), args=(1,)) == 1


class Batch:
    """Answers all its callers at once, when the last of them has called."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._total = 0
        self._waiting = 0
        self._future: Int = torch.futures.Future()

    @rpc.functions.async_execution
    def add(self, amount: int) -> Int:
        with self._lock:
            self._total += amount
            self._waiting += 1
            complete = self._waiting == self._size
        if complete:
            self._future.set_result(self._total)
        return self._future


def fill_a_batch(worker: Worker) -> list[int]:
    batch = rpc.remote("worker1", Batch, args=(40,))
    return [future.wait() for future in [batch.rpc_async().add(number) for number in range(40)]]


def test_many_callers_wait_for_one_future_without_a_thread_each(run_workers: RunWorkers) -> None:
    value = first_of(run_workers, fill_a_batch, num_worker_threads=1)
    assert value == [sum(range(40))] * 40


# ---- how it fails


@rpc.functions.async_execution
def raise_later() -> Int:
    future: Int = torch.futures.Future()
    threading.Thread(target=future.set_exception, args=(LookupError("later"),)).start()
    return future


@rpc.functions.async_execution
def no_future() -> int:
    return 3


FAILING: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (raise_later, LookupError, "later"),
    (
        no_future,
        RpcError,
        r"must return a torch\.futures\.Future object.*no_future on worker 'worker\d' returned an int",
    ),
]


@in_standing_group()
def test_failure_is_the_callers() -> None:
    for failing, error, message in FAILING:
        waits: list[Callable[[], Any]] = [
            lambda failing=failing: rpc.rpc_sync("worker1", failing),  # type: ignore[misc]
            rpc.remote("worker1", failing).to_here,
            lambda failing=failing: rpc.rpc_sync("worker0", failing),  # type: ignore[misc]
        ]
        for wait in waits:
            with pytest.raises(error, match=message):
                wait()
    assert rpc.rpc_sync("worker1", abs, args=(-1,)) == 1
