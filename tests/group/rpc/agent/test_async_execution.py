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
Futures = list[torch.futures.Future[Any]]


def completed_elsewhere(value: int) -> Int:
    """A future that another thread completes, after this function has returned."""
    future: Int = torch.futures.Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@rpc.functions.async_execution
def function(x: int) -> Int:
    return completed_elsewhere(x + 1)


class Remote:
    """One method of each kind; with either order of the decorators where there are two."""

    def __init__(self, start: int = 100) -> None:
        self.start = start

    @rpc.functions.async_execution
    def method(self, x: int) -> Int:
        return completed_elsewhere(self.start + x)

    @staticmethod
    @rpc.functions.async_execution
    def static(x: int) -> Int:
        return completed_elsewhere(x + 2)

    @rpc.functions.async_execution
    @staticmethod
    def static_marked_outside(x: int) -> Int:
        return completed_elsewhere(x + 3)

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, x: int) -> Int:
        return completed_elsewhere(x + len(cls.__name__))

    @rpc.functions.async_execution
    @classmethod
    def of_class_marked_outside(cls, x: int) -> Int:
        return completed_elsewhere(x + 2 * len(cls.__name__))


KINDS: dict[str, tuple[Callable[..., Any], int]] = {
    "function": (function, 1 + 1),
    "method": (Remote(50).method, 1 + 50),
    "static method": (Remote.static, 1 + 2),
    "static method, marked outside": (Remote.static_marked_outside, 1 + 3),
    "class method": (Remote.of_class, 1 + 6),
    "class method, marked outside": (Remote.of_class_marked_outside, 1 + 12),
    "marked when it is sent": (rpc.functions.async_execution(completed_elsewhere), 1),
}


@pytest.mark.parametrize("kind", KINDS)
@in_standing_group()
def test_every_kind_of_function_can_be_marked(kind: str) -> None:
    marked, value = KINDS[kind]
    assert [
        rpc.rpc_sync("worker1", marked, args=(1,)),
        rpc.rpc_async("worker1", marked, args=(1,)).wait(),
        rpc.remote("worker1", marked, args=(1,)).to_here(),
        rpc.rpc_sync("worker0", marked, args=(1,)),
    ] == [value] * 4


METHODS = {
    "method": 101,
    "static": 3,
    "static_marked_outside": 4,
    "of_class": 7,
    "of_class_marked_outside": 13,
}


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
@in_standing_group()
def test_marked_methods_through_proxies(owner: str) -> None:
    rref = rpc.remote(owner, Remote)
    assert [
        {name: getattr(rref.rpc_sync(), name)(1) for name in METHODS},
        {name: getattr(rref.rpc_async(), name)(1).wait() for name in METHODS},
        {name: getattr(rref.remote(), name)(1).to_here() for name in METHODS},
    ] == [METHODS] * 3


# ---- what it is for


@rpc.functions.async_execution
def sum_of_two_calls(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    calls: Futures = [rpc.rpc_async(to, torch.add, args=(x, number)) for number in (1, 2)]
    collected = torch.futures.collect_all(calls)
    return collected.then(lambda all_: sum((each.wait() for each in all_.wait()), torch.zeros(())))


def test_calls_are_chained_without_a_thread(run_workers: RunWorkers) -> None:
    def ask(_: Worker) -> torch.Tensor:
        calls: Futures = [
            rpc.rpc_async("worker1", sum_of_two_calls, args=("worker2", torch.tensor(float(number))))
            for number in range(50)
        ]
        return torch.stack(torch.futures.wait_all(calls))

    value = first_of(run_workers, ask, world_size=3, num_worker_threads=1)
    assert torch.equal(value, 2 * torch.arange(50.0) + 3)


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
def raise_at_once() -> Int:
    raise LookupError("at once")


@rpc.functions.async_execution
def raise_later() -> Int:
    future: Int = torch.futures.Future()
    threading.Thread(target=future.set_exception, args=(LookupError("later"),)).start()
    return future


@rpc.functions.async_execution
def raise_in_then() -> torch.futures.Future[None]:
    def fail(_: object) -> None:
        raise LookupError("in then")

    return completed_elsewhere(1).then(fail)


@rpc.functions.async_execution
def no_future() -> int:
    return 3


FAILING: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (raise_at_once, LookupError, "at once"),
    (raise_later, LookupError, "later"),
    (raise_in_then, RuntimeError, "in then"),
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
            rpc.rpc_async("worker1", failing).wait,
            rpc.remote("worker1", failing).to_here,
            lambda failing=failing: rpc.rpc_sync("worker0", failing),  # type: ignore[misc]
        ]
        for wait in waits:
            with pytest.raises(error, match=message):
                wait()
    assert rpc.rpc_sync("worker1", abs, args=(-1,)) == 1
