"""Functions and callbacks that wait for other calls, however many and wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import BlockingCallError
from tests.support.serving import (
    WAIT_SECONDS,
    in_standing_group,
    in_worker0,
    open_gate,
    wait_at_gate,
)

Futures = list[torch.futures.Future[Any]]


def add(x: int, y: int) -> int:
    return x + y


# ---- callbacks


@in_standing_group()
def test_callbacks_may_make_blocking_calls() -> None:
    """Completed by whom: by an executor thread, by the one that waits, or done before."""

    def ask_again(done: torch.futures.Future[int]) -> int:
        return int(rpc.rpc_sync("worker1", add, args=(done.wait(), 10)))

    def ask_through_another(done: torch.futures.Future[int]) -> int:
        return rpc.rpc_async("worker1", add, args=(done.wait(), 20)).then(ask_again).wait()

    unattended = (
        rpc.rpc_async("worker1", wait_at_gate, args=("unattended", 1)).then(ask_again).then(ask_again)
    )
    rpc.rpc_sync("worker1", open_gate, args=("unattended",))
    values = [unattended.wait()]
    attended = rpc.rpc_async("worker1", wait_at_gate, args=("attended", 1))
    chained = attended.then(ask_through_another)
    rpc.rpc_async("worker1", open_gate, args=("attended",))
    values += [attended.wait(), chained.wait(), attended.then(ask_through_another).wait()]
    assert values == [21, 1, 31, 31]


@in_worker0(num_worker_threads=1)
def test_callbacks_of_collect_all_may_make_blocking_calls() -> None:
    def total(done: torch.futures.Future[Futures]) -> int:
        return sum(rpc.rpc_sync("worker1", add, args=(each.wait(), 1)) for each in done.wait())

    collected = []
    for _round in range(20):
        calls: Futures = [rpc.rpc_async("worker1", add, args=(number, 0)) for number in range(5)]
        collected.append(torch.futures.collect_all(calls).then(total))
    assert sum(each.wait() for each in collected) == 20 * (10 + 5)


@in_standing_group()
def test_done_callbacks_may_make_blocking_calls() -> None:
    answers: list[int] = []
    done = rpc.Future[None]()

    def ask_again(future: torch.futures.Future[int]) -> None:
        answers.append(rpc.rpc_sync("worker1", add, args=(future.value(), 1)))
        if len(answers) == 10:
            done.set_result(None)

    for number in range(10):
        rpc.rpc_async("worker1", add, args=(number, 0)).add_done_callback(ask_again)
    done.wait()
    assert sum(answers) == sum(range(10)) + 10


# ---- functions


def other() -> str:
    return f"worker{1 - rpc.get_worker_info().id}"


def wait_for_value(depth: int) -> int:
    return depth and 1 + int(rpc.rpc_sync(other(), wait_for_value, args=(depth - 1,)))


def collect_value(depth: int) -> int:
    """Waits where the agent cannot see it: in PyTorch's own C++."""
    if depth == 0:
        return 0
    calls: Futures = [rpc.rpc_async(other(), collect_value, args=(depth - 1,))]
    return 1 + int(torch.futures.collect_all(calls).wait()[0].value())


def fetch_value(depth: int) -> int:
    return depth and 1 + int(rpc.remote(other(), fetch_value, args=(depth - 1,)).to_here())


@pytest.mark.parametrize("recurse", [wait_for_value, collect_value, fetch_value], ids=lambda f: f.__name__)
@in_standing_group()
def test_recursion_between_two_workers_may_be_deep(recurse: Callable[[int], int]) -> None:
    """Depth 200, so that 100 functions wait on each of two workers with 16 threads."""
    assert recurse(200) == 200


# ---- coroutines


def wait_for_all() -> None:
    with rpc.wait_all():
        rpc.rpc_async("worker0", wait_at_gate)


_refused_calls: list[Any] = []

BLOCKING: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("worker0", _refused_calls.append, args=(rpc.RRef(1),)),
    "wait": lambda: rpc.rpc_async("worker0", wait_at_gate).wait(),
    "to_here": lambda: rpc.remote("worker0", wait_at_gate).to_here(),
    "local_value": lambda: rpc.remote("worker1", wait_at_gate).local_value(),
    "proxy": lambda: rpc.remote("worker0", list).rpc_sync().copy(),
    "proxy of remote": lambda: rpc.remote("worker0", list).remote().copy(),
    "barrier": rpc.barrier,
    "wait_all": wait_for_all,
}


async def block_in_every_way() -> dict[str, str]:
    """The names of what was raised. A coroutine may await calls before and after."""
    raised = {}
    for name, call in BLOCKING.items():
        assert await rpc.rpc_async("worker0", add, args=(1, 2)) == 3
        with pytest.raises(BlockingCallError, match=r"'await rpc_async\(\.\.\.\)'") as caught:
            call()
        raised[name] = type(caught.value).__name__
    assert await rpc.rpc_async("worker0", add, args=(1, 2)) == 3
    return raised


@in_standing_group()
def test_a_blocking_call_in_a_coroutine_is_refused() -> None:
    answer: dict[str, str] = rpc.rpc_sync("worker1", block_in_every_way)
    for rank in (0, 1):
        rpc.rpc_sync(rank, open_gate)
    assert answer == dict.fromkeys(BLOCKING, "BlockingCallError")
    assert not _refused_calls


# ---- what blocks holds up nobody else


@in_standing_group()
def test_a_callee_that_blocks_does_not_hold_up_the_next_call() -> None:
    waiting = rpc.rpc_async("worker1", wait_at_gate, args=("", 3))
    for number in range(100):
        assert rpc.rpc_sync("worker1", add, args=(number, 1)) == number + 1
    rpc.rpc_sync("worker1", open_gate)
    assert int(waiting.wait()) == 3


class EndsAtGate:
    """Arrives as a number; where it was made, its destructor waits at the gate."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (3,)

    def __del__(self) -> None:
        wait_at_gate()


@in_standing_group()
def test_a_destructor_of_what_was_returned_does_not_hold_up_the_next_call() -> None:
    for number in range(20):
        rpc.rpc_sync("worker1", add, args=(number, 1))
    value = rpc.rpc_sync("worker1", EndsAtGate)
    rpc.rpc_sync("worker1", open_gate, timeout=WAIT_SECONDS / 2)
    assert int(value) == 3  # type: ignore[call-overload]
