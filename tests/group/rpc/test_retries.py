"""``retries`` of ``rpc_sync`` and ``rpc_async``: a call is made again if its callee is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import CancelledError
from fractions import Fraction
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import (
    BlockingCallError,
    MessageLostError,
    NotInitializedError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.retrying import Returns, returns_of
from rpc.runtime.current import current_agent
from tests.support.orders import ask, dismiss, follow_orders, start_followers
from tests.support.serving import in_standing_group, in_worker0, open_gate, wait_at_gate
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess, Workers, current_worker


def count(by: int = 1) -> int:
    """Counts the runs of all processes of the test, in its folder."""
    runs = len(list(Path().glob("run*"))) + by
    Path(f"run{runs}").touch()
    return runs


def die_until(run: int) -> int:
    """Each run dies, before the one with that number."""
    runs = count()
    if runs < run:
        current_worker().die()
    return runs


async def die_until_in_coroutine(run: int) -> int:
    return die_until(run)


def fail() -> None:
    raise ValueError(f"run {count()}")


def raise_loss() -> None:
    count()
    raise WorkerLostError("worker 'worker1' is gone, says the function", "worker1", "it is not")


class WithoutGradients:
    """An argument that can be sent only while no gradients are recorded."""

    def __reduce__(self) -> tuple[Any, ...]:
        assert not torch.is_grad_enabled()
        return int, ()


def lose_answer(argument: object) -> int:
    """Fails the first time with the error that the callee sends when its answer was lost."""
    if count() == 1:
        raise MessageLostError("the call ran, and its answer was lost: the connection was cut", "worker0")
    return runs()


def runs() -> int:
    return len(list(Path().glob("run*")))


def start(run_workers: RunWorkers, order: Callable[[], Any], **options: Any) -> Workers:
    """Two workers of a dynamic group, of which the first has begun to do something."""
    workers = start_followers(run_workers, 2, **{"dynamic": True, **options})
    workers[0].tell("order", order)
    return workers


def come_back(workers: Workers, number: int = 1) -> WorkerProcess:
    """Once the worker has died, another one with its name joins; the call may end it at once."""
    workers[number].result()
    return workers.add(follow_orders, kwargs={"dynamic": True}, name="worker1", rank=1)


def call(function: Callable[..., Any], *args: Any, to: Any = "worker1", **options: Any) -> Any:
    return rpc.rpc_sync(to, function, args, **options)


def call_async(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with rpc.wait_all():
        future = rpc.rpc_async(1, function, args, **options).then(lambda done: done.value())
    return future.wait()


def await_call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    async def main() -> Any:
        return await rpc.rpc_async("worker1", function, args, **options)

    return asyncio.run(main())


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(WorkerLostError) as caught:
        call(function, *args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("calls", "function"), [(call, die_until), (call_async, die_until), (await_call, die_until_in_coroutine)]
)
def test_a_call_is_made_again_when_its_callee_is_back(
    run_workers: RunWorkers, calls: Callable[..., Any], function: Callable[..., Any]
) -> None:
    workers = start(run_workers, functools.partial(calls, function, 3, retries=2))
    come_back(workers)
    come_back(workers, 2)
    assert workers[0].wait_for("done") == 3
    dismiss(workers)


def test_a_call_fails_once_its_retries_are_used_up(run_workers: RunWorkers) -> None:
    workers = start(run_workers, functools.partial(error_of, die_until, 9, retries=1))
    come_back(workers)
    text = workers[0].wait_for("done")
    assert "die_until was not answered" in text
    assert ask(workers[0], runs) == 2
    dismiss(workers)


def test_a_call_fails_if_its_callee_does_not_come_back_in_time(run_workers: RunWorkers) -> None:
    workers = start(run_workers, functools.partial(error_of, die_until, 9))
    assert "back" not in workers[0].wait_for("done")
    text = ask(workers[0], functools.partial(error_of, die_until, 9, retries=5, timeout=Fraction(1, 10)))
    assert text.endswith("It did not come back within the timeout of the call")
    dismiss(workers)


def test_in_a_static_group_a_lost_callee_is_not_waited_for(run_workers: RunWorkers) -> None:
    workers = start(
        run_workers, functools.partial(error_of, die_until, 9, retries=5, timeout=0), dynamic=False
    )
    text = workers[0].wait_for("done")
    assert "back" not in text
    dismiss(workers)


@in_worker0()
def test_errors_of_the_function_and_timeouts_are_no_losses() -> None:
    with pytest.raises(ValueError, match="run 1"):
        rpc.rpc_sync("worker1", fail, retries=3)
    with pytest.raises(WorkerLostError, match="says the function"):
        rpc.rpc_sync("worker1", raise_loss, retries=3)
    assert runs() == 2
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", wait_at_gate, timeout=0.05, retries=3)
    rpc.rpc_sync("worker1", open_gate)
    with pytest.raises(UnknownWorkerError):
        rpc.rpc_async("worker7", fail, retries=3)
    for retries in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="retries"):
            rpc.rpc_sync("worker1", fail, retries=retries)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rpc.rpc_sync("worker1", fail, timeout="1", retries=3)  # type: ignore[call-overload]
    assert runs() == 2


@in_worker0()
def test_a_call_whose_answer_was_lost_is_made_again() -> None:
    with torch.no_grad():
        assert rpc.rpc_sync("worker1", lose_answer, (WithoutGradients(),), retries=1) == 2


async def block() -> None:
    rpc.rpc_sync("worker0", int, retries=1)


@in_standing_group()
def test_a_coroutine_must_await_a_call_with_retries() -> None:
    with pytest.raises(BlockingCallError):
        rpc.rpc_sync("worker1", block)


async def sleep_long() -> None:
    current_worker().report("sleeps")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        current_worker().report("cancelled")
        raise


def cancel_while_it_runs(worker: Worker) -> None:
    with worker.group():
        future = rpc.rpc_async("worker1", sleep_long, retries=3)
        worker.wait_for("cancel")
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(CancelledError):
            future.wait()
        worker.wait_for("leave")


def test_a_call_with_retries_can_be_cancelled_at_its_callee(run_workers: RunWorkers) -> None:
    workers = run_workers.start([cancel_while_it_runs, follow_orders])
    workers[1].wait_for("sleeps")
    workers[0].tell("cancel")
    workers[1].wait_for("cancelled")
    workers[0].tell("leave")
    dismiss(workers)


_futures: list[rpc.Future[Any]] = []


def begin() -> None:
    _futures.append(rpc.rpc_async("worker1", die_until, (9,), retries=3, timeout=600))


def end_wait(end: Callable[[rpc.Future[Any]], object], error: type[Exception]) -> None:
    returns = returns_of(current_agent())
    assert isinstance(returns, Returns)
    until(lambda: returns._waiting)
    (wait,) = returns._waiting["worker1"]
    end(_futures[0])
    with pytest.raises(error):
        _futures[0].wait(20)
    assert not wait._callbacks  # its timer refers to it until the time is over


def give_up(future: rpc.Future[Any]) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(main())


def leave(future: object) -> None:
    rpc.shutdown(graceful=False)


def follow_and_stay(worker: Worker) -> None:
    with contextlib.suppress(NotInitializedError):
        follow_orders(worker, dynamic=True)


@pytest.mark.parametrize(
    ("end", "error"),
    [(methodcaller("cancel"), CancelledError), (give_up, CancelledError), (leave, NotInitializedError)],
)
def test_the_wait_for_a_callee_to_come_back_can_be_ended(
    run_workers: RunWorkers, end: Callable[[Any], object], error: type[Exception]
) -> None:
    workers = run_workers.start(follow_and_stay, 2)
    workers.wait_for("ready")
    ask(workers[0], begin)
    workers[1].result()
    ask(workers[0], end_wait, end, error)
    dismiss(workers)
