"""What user code leaves in force on a thread, or in a context, is in force in no call after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dist_autograd
import rpc
from tests.support.modes import DEFAULTS, USER, leave_everything, look
from tests.support.serving import in_standing_group, in_worker0
from tests.support.streams import SOON, until

CALLEE = "worker1"


class Leaves:
    """Leaves everything in force when it is made, called, fetched, or sent."""

    def __init__(self) -> None:
        leave_everything()

    def method(self) -> None:
        leave_everything()

    async def coroutine(self) -> None:
        leave_everything()

    def __reduce__(self) -> Any:
        leave_everything()
        return Leaves, ()


class LeavesWhenItDies:
    def __del__(self) -> None:
        leave_everything()


def completes() -> torch.futures.Future[None]:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return future


@rpc.functions.async_execution
def leaves_and_returns_a_future() -> torch.futures.Future[None]:
    leave_everything()
    return completes()


@rpc.functions.async_execution
def leaves_in_a_callback() -> torch.futures.Future[Any]:
    return rpc.rpc_async(CALLEE, int).then(lambda _: leave_everything())


async def leaves_in_a_coroutine() -> None:
    leave_everything()
    await asyncio.sleep(0)
    leave_everything()


async def leaves_beside_a_coroutine() -> None:
    asyncio.get_running_loop().call_soon(leave_everything)
    await asyncio.to_thread(leave_everything)


def raises() -> None:
    leave_everything()
    raise LookupError


def call_that_raises() -> None:
    with pytest.raises(LookupError):
        rpc.rpc_sync(CALLEE, raises)


async def look_in_a_coroutine() -> dict[str, Any]:
    before = look()
    await asyncio.sleep(0)
    assert look() == before
    return before


class Looks:
    def method(self) -> dict[str, Any]:
        return look()


def method_of(kind: type[Any], name: str) -> Any:
    return getattr(rpc.remote(CALLEE, kind).rpc_sync(), name)()


LEAVERS: dict[str, Callable[[], object]] = {
    "function": lambda: rpc.rpc_sync(CALLEE, leave_everything),
    "function that raises": call_that_raises,
    "async_execution": lambda: rpc.rpc_sync(CALLEE, leaves_and_returns_a_future),
    "callback": lambda: rpc.rpc_sync(CALLEE, leaves_in_a_callback),
    "coroutine": lambda: rpc.rpc_sync(CALLEE, leaves_in_a_coroutine),
    "beside a coroutine": lambda: rpc.rpc_sync(CALLEE, leaves_beside_a_coroutine),
    "constructor": lambda: rpc.remote(CALLEE, Leaves).rpc_sync(),
    "method": lambda: method_of(Leaves, "method"),
    "coroutine method": lambda: method_of(Leaves, "coroutine"),
    "pickling": lambda: rpc.remote(CALLEE, Leaves).to_here(),
    "argument's pickling": lambda: rpc.rpc_sync(CALLEE, type, args=(Leaves(),)),
    "destructor": lambda: rpc.rpc_sync(CALLEE, id, args=(LeavesWhenItDies(),)),
}


def looks() -> Iterator[dict[str, Any]]:
    """What calls of every kind see."""
    yield rpc.rpc_sync(CALLEE, look)
    yield rpc.rpc_sync(CALLEE, look_in_a_coroutine)
    yield rpc.remote(CALLEE, look).to_here()
    yield method_of(Looks, "method")


@pytest.mark.parametrize("name", LEAVERS)
@in_worker0(num_worker_threads=1)
def test_what_a_call_leaves_is_in_force_in_no_other(name: str) -> None:
    LEAVERS[name]()
    assert list(looks()) == [DEFAULTS] * 4


@in_standing_group()
def test_callbacks_on_the_waiting_thread_have_the_defaults_and_leave_it_as_it_was() -> None:
    seen: list[dict[str, Any]] = []

    def callback(_: Any) -> None:
        seen.append(look())
        leave_everything()

    USER.set("me")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = look()
        future = rpc.rpc_async(CALLEE, int)
        future.then(callback)
        future.add_done_callback(callback)
        future.wait()
        future.then(callback).wait()
        until(lambda: len(seen) == 3)  # an early answer completes the future on another thread
        assert look() == before
    assert seen == [DEFAULTS | {"user": "me"}] * 3


@in_standing_group()
def test_a_callback_of_gathered_futures_leaves_nothing_to_calls() -> None:
    for _ in range(5):
        gathered = torch.futures.collect_all([rpc.rpc_async(CALLEE, int) for _ in range(3)])
        done = threading.Event()

        def leave(_: Any, done: threading.Event = done) -> None:
            leave_everything()
            done.set()

        gathered.then(leave)
        assert done.wait(SOON)  # no thread waits for the calls, so executor threads complete them
    assert rpc.rpc_sync("worker0", look) == DEFAULTS


async def evaluate(x: torch.Tensor) -> bool:
    with torch.no_grad():
        await rpc.rpc_async(CALLEE, int)
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(3)])
        return (x * 2).requires_grad


async def train(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        await asyncio.sleep(0)
    return x * 2


@in_standing_group()
def test_a_coroutine_that_awaits_under_no_grad_costs_no_other_its_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    evaluated = []
    for _ in range(10):
        evaluated += [rpc.rpc_async(CALLEE, evaluate, args=(x,)) for _ in range(4)]
        with dist_autograd.context() as context:
            doubled = rpc.rpc_sync(CALLEE, train, args=(x,))
            dist_autograd.backward(context, [(doubled + x).sum()])
            assert dist_autograd.get_gradients(context)[x].tolist() == [3.0] * 3
    assert not any(future.wait() for future in evaluated)
