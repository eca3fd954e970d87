"""The futures of calls: PyTorch's own, that can also be awaited and collected."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rpc
from tests.support.serving import first_of, in_worker0, open_gate, wait_at_gate
from tests.support.workers import RunWorkers, Worker

Futures = list[torch.futures.Future[Any]]


def add(x: int, y: int) -> int:
    return x + y


def fail(message: str) -> None:
    raise LookupError(message)


def call(x: int, y: int = 1, to: str = "worker1") -> rpc.Future[int]:
    return rpc.rpc_async(to, add, args=(x, y))


# ---- as PyTorch's


def fail_in_chain(_: Worker) -> list[str]:
    ended = []
    failing = rpc.rpc_async("worker1", fail, args=("first",))
    for future in (
        failing.then(lambda done: done.value()),
        call(1).then(lambda _: fail("second")),
        torch.futures.collect_all([call(1), failing]).then(
            lambda done: [each.wait() for each in done.wait()]
        ),
    ):
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        ended.append(str(caught.value))
    return ended


def test_an_error_in_a_chain_is_the_error_of_its_end(run_workers: RunWorkers) -> None:
    messages = first_of(run_workers, fail_in_chain)
    assert ["first" in messages[0], "second" in messages[1], "first" in messages[2]] == [True] * 3


@in_worker0()
def test_collect_all_and_wait_all_of_pytorch() -> None:
    calls: Futures = [call(number) for number in range(20)]
    collected = [each.value() for each in torch.futures.collect_all(calls).wait()]
    calls = [call(number, to=f"worker{number % 2}") for number in range(20)]
    assert [collected, torch.futures.wait_all(calls)] == [list(range(1, 21))] * 2


def wait_on_many_threads(_: Worker) -> list[int]:
    future = rpc.rpc_async("worker1", wait_at_gate, args=("", 3))
    together = threading.Barrier(9)

    def wait() -> int:
        together.wait(20)
        return int(future.wait())

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(wait) for _ in range(8)]
        together.wait(20)
        rpc.rpc_sync("worker1", open_gate)
        return [each.result(20) for each in waiting]


def test_many_threads_wait_for_one_future(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, wait_on_many_threads) == [3] * 8


# ---- awaited


async def await_several() -> list[int]:
    future = call(1)
    first = await future
    again = await future
    both = await asyncio.gather(*(_awaited(call(number)) for number in range(20)))
    following = await call(1).then(lambda done: done.value() * 10)
    return [first, again, sum(both), following]


async def _awaited(future: rpc.Future[int]) -> int:
    return await future


def test_a_future_can_be_awaited_on_any_loop(run_workers: RunWorkers) -> None:
    def on_loops(_: Worker) -> list[list[int]]:
        def on_a_loop(_: int) -> list[int]:
            return asyncio.run(await_several())

        with ThreadPoolExecutor(3) as threads:
            return [on_a_loop(0), *threads.map(on_a_loop, range(3))]

    assert first_of(run_workers, on_loops) == [[2, 2, sum(range(1, 21)), 20]] * 4


async def add_all(numbers: list[int], to: str) -> int:
    """An ``async def`` callee that awaits calls of its own."""
    total = 0
    for number in numbers:
        total = await rpc.rpc_async(to, add, args=(total, number))
    return total


@in_worker0(num_worker_threads=1)
def test_an_async_def_callee_awaits_calls() -> None:
    futures = [rpc.rpc_async("worker1", add_all, args=([n] * 5, "worker0")) for n in range(50)]
    assert [future.wait() for future in futures] == [5 * number for number in range(50)]


# ---- collected


@in_worker0()
def test_wait_all_waits_for_the_calls_in_its_block_only() -> None:
    rref = rpc.remote("worker1", list, args=([1, 2],))
    with rpc.wait_all():
        futures: list[rpc.Future[Any]] = [call(number) for number in range(10)]
        futures.append(rref.rpc_async().copy())
    assert all(future.done() for future in futures)
    future = rpc.rpc_async("worker1", wait_at_gate)
    assert not future.done()
    rpc.rpc_sync("worker1", open_gate)


@in_worker0()
def test_wait_all_blocks_may_be_nested() -> None:
    with rpc.wait_all():
        outer = [rpc.rpc_async("worker1", wait_at_gate)]
        with rpc.wait_all():
            inner = call(1)
        assert inner.done()
        assert not outer[0].done()
        outer.append(call(2))
        rpc.rpc_async("worker1", open_gate)
    assert all(future.done() for future in outer)


@in_worker0()
def test_wait_all_raises_without_waiting_for_the_others() -> None:
    held = []

    def fail_among_others() -> None:
        with rpc.wait_all():
            held.append(rpc.rpc_async("worker1", wait_at_gate))
            rpc.rpc_async("worker1", fail, args=("the first to fail",))

    def fail_in_the_block() -> None:
        with rpc.wait_all():
            held.append(rpc.rpc_async("worker1", wait_at_gate))
            raise ZeroDivisionError

    with pytest.raises(LookupError, match="the first to fail"):
        fail_among_others()
    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert not any(future.done() for future in held)
    rpc.rpc_sync("worker1", open_gate)
