"""The futures of calls: PyTorch's own, that can also be awaited and collected."""

from __future__ import annotations

from typing import Any

import pytest

import rpc
from tests.support.serving import in_worker0, open_gate, wait_at_gate


def add(x: int, y: int) -> int:
    return x + y


def fail(message: str) -> None:
    raise LookupError(message)


def call(x: int, y: int = 1, to: str = "worker1") -> rpc.Future[int]:
    return rpc.rpc_async(to, add, args=(x, y))


# ---- awaited


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
