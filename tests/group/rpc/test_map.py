"""``rpc.map``: items are spread over workers that are free, and each has one outcome, whatever happens."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import (
    BlockingCallError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.group.workers import WorkerInfo
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.serving import (
    in_standing_group,
    in_worker0,
    open_gate,
    serve,
    wait_at_gate,
    wait_for_arrivals,
)
from tests.support.workers import RunWorkers, Worker, current_worker

_seen: list[str] = []
_tag: ContextVar[str] = ContextVar("tag", default="none")


def square(item: int) -> int:
    return item * item


async def square_soon(item: int) -> int:
    await asyncio.sleep(0)
    return item * item


def square_or_fail(item: int) -> int:
    if item % 3 == 1:
        raise ValueError(f"not {item}")
    return item * item


def stop_iteration(item: int) -> int:
    if item % 2:
        raise (StopIteration if item == 1 else StopAsyncIteration)(item)
    return item


def name_at_gate(item: int) -> tuple[int, str]:
    """Waits at the gate with item 0, and returns the item with the worker that has it."""
    if item == 0:
        wait_at_gate()
    return item, current_worker().name


def note_and_wait(item: int) -> int:
    _seen.append(str(item))
    return int(wait_at_gate(value=item))


async def sleep_after_first(item: int) -> int:
    if item > 0:
        current_worker().report("sleeps", item)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            current_worker().report("cancelled", item)
            raise
    return item


def seen() -> list[str]:
    return list(_seen)


def counted(items: Iterator[int], read: list[int]) -> Iterator[int]:
    for item in items:
        read.append(item)
        yield item


def outcomes(results: rpc.MapResults[Any]) -> list[Any]:
    """All results, with the types of errors in their places."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(results))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error).__name__)


# ---- results and their order


@in_standing_group(3)
def test_results_come_in_the_order_of_the_items() -> None:
    assert list(rpc.map(square, range(20))) == [item * item for item in range(20)]
    assert list(rpc.map(square_soon, range(5), workers=[1, WorkerInfo("worker2", 2), "worker1"])) == [
        item * item for item in range(5)
    ]
    assert list(rpc.map(functools.partial(torch.add, alpha=2, other=torch.ones(())), torch.arange(2.0))) == [
        2.0,
        3.0,
    ]
    assert list(rpc.map(square, [], workers=["worker0"])) == []


@in_standing_group(3)
def test_free_workers_get_the_items_and_unordered_results_come_as_they_are_there() -> None:
    results = rpc.map(name_at_gate, range(10), ordered=False)
    others = [next(results) for _ in range(9)]
    assert sorted(item for item, _ in others) == list(range(1, 10))
    (at_the_gate,) = {"worker1", "worker2"} - {name for _, name in others}
    rpc.rpc_sync(at_the_gate, open_gate)
    assert next(results) == (0, at_the_gate)
    assert list(results) == []


@in_standing_group(3)
def test_items_are_read_only_as_far_ahead_as_allowed() -> None:
    read: list[int] = []
    with rpc.map(name_at_gate, counted(itertools.count(), read), look_ahead=5) as results:
        assert read == []
        for worker in ("worker1", "worker2"):
            rpc.rpc_sync(worker, open_gate)
        assert [next(results)[0] for _ in range(7)] == list(range(7))
        assert len(read) <= 7 + 5 - 1
    assert list(results) == []


@in_worker0(num_worker_threads=8)
def test_a_worker_computes_as_many_items_at_a_time_as_asked() -> None:
    with ThreadPoolExecutor(1) as reader:
        results = reader.submit(list, rpc.map(note_and_wait, range(5), concurrency=3))
        rpc.rpc_sync("worker1", wait_for_arrivals, args=(3,))
        assert sorted(rpc.rpc_sync("worker1", seen)) == ["0", "1", "2"]
        rpc.rpc_sync("worker1", open_gate)
        assert results.result() == list(range(5))


# ---- errors


@in_standing_group(3)
def test_a_failing_item_raises_in_its_place_and_the_others_have_results() -> None:
    results = rpc.map(square_or_fail, range(6))
    assert outcomes(results) == [0, "ValueError", 4, 9, "ValueError", 25]
    with pytest.raises(ValueError, match="not 1") as caught:
        list(rpc.map(square_or_fail, range(6)))
    assert any("rpc.map: item 1, on worker 'worker" in note for note in caught.value.__notes__)


@in_standing_group()
def test_an_item_that_raises_stop_iteration_does_not_end_the_iteration() -> None:
    async def collect() -> list[int]:
        return [each async for each in rpc.map(stop_iteration, [3])]

    assert outcomes(rpc.map(stop_iteration, range(5))) == [0, "RuntimeError", 2, "RuntimeError", 4]
    with pytest.raises(RuntimeError, match="item 0, on worker 'worker1' raised StopIteration"):
        list(rpc.map(stop_iteration, [1]))
    with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
        asyncio.run(collect())


def read_until(last: int) -> Iterator[int]:
    yield from range(last)
    raise OSError("the file has ended")


@in_standing_group()
def test_an_item_that_cannot_be_read_or_sent_fails_in_its_place() -> None:
    assert outcomes(rpc.map(square, read_until(3))) == [0, 1, 4, "OSError"]
    unsendable: list[object] = [1, iter(read_until(0)), 3]
    assert outcomes(rpc.map(repr, unsendable)) == ["1", "SerializationError", "3"]


@in_worker0(max_message_bytes=1 << 16)
def test_an_item_over_the_limit_of_messages_fails_in_its_place() -> None:
    assert outcomes(rpc.map(len, [b"1", bytes(1 << 17), b"123"])) == [1, "SerializationError", 3]
    assert outcomes(rpc.map(bytes, [1, 1 << 17, 3])) == [b"\0", "SerializationError", b"\0\0\0"]


@in_standing_group()
def test_each_item_has_the_timeout() -> None:
    results = rpc.map(name_at_gate, range(2), timeout=0.05, concurrency=2)
    with pytest.raises(RpcTimeoutError, match=r"name_at_gate.*: rpc\.map\(\.\.\., timeout=0\) has no limit"):
        next(results)
    rpc.rpc_sync("worker1", open_gate)


@in_standing_group()
def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    for error, arguments in (
        (TypeError, {"function": 3}),
        (TypeError, {"items": 3}),
        (TypeError, {"workers": "worker1"}),
        (TypeError, {"workers": 1}),
        (UnknownWorkerError, {"workers": ["worker1", "worker7\x1b[31m<b>"]}),
        (ValueError, {"workers": []}),
        (ValueError, {"concurrency": 0}),
        (ValueError, {"look_ahead": 0}),
        (ValueError, {"look_ahead": 1.5}),
        (ValueError, {"retries": -1}),
        (ValueError, {"retries": True}),
    ):
        call: dict[str, Any] = {"function": square, "items": [1], **arguments}
        with pytest.raises(error):
            rpc.map(**call)


# ---- ends


def end_in_between(worker: Worker, end: Callable[[list[Any]], object]) -> None:
    with worker.group():
        results = [rpc.map(sleep_after_first, range(4))]
        assert next(results[0]) == 0
        worker.wait_for("end")
        end(results)
        worker.wait_for("leave")


def close(results: list[Any]) -> None:
    results[0].close()
    assert list(results[0]) == []


@pytest.mark.parametrize("end", [close, list.clear])
def test_closing_or_dropping_the_iterator_cancels_what_is_under_way(
    run_workers: RunWorkers, end: Callable[[Any], object]
) -> None:
    workers = run_workers.start([functools.partial(end_in_between, end=end), serve])
    assert workers[1].wait_for("sleeps") == 1
    workers[0].tell("end")
    assert workers[1].wait_for("cancelled") == 1  # and the others have not begun
    workers[0].tell("leave")
    workers.results()


@in_worker0(world_size=1)
def test_a_worker_that_is_alone_computes_the_items_itself() -> None:
    assert list(rpc.map(square, range(3))) == [0, 1, 4]


def test_no_item_is_awaited_when_this_worker_leaves(run_workers: RunWorkers) -> None:
    run_workers([leave_in_between, serve])


def leave_in_between(worker: Worker) -> None:
    worker.join()
    results = rpc.map(square, range(9), look_ahead=2)
    assert next(results) == 0
    rpc.shutdown(graceful=False)
    left = outcomes(results)
    assert len(left) == 8
    assert set(left[2:]) <= {"NotInitializedError", "WorkerLostError"}


# ---- coroutines


async def add_squares(count: int) -> int:
    with rpc.map(square, range(count), workers=["worker0", "worker2"]) as results:
        return sum([each async for each in results])


async def block_in_coroutine() -> int:
    return sum(rpc.map(square, range(3)))


async def fail_in_coroutine() -> list[int]:
    return [each async for each in rpc.map(square_or_fail, range(3))]


@in_standing_group(3)
def test_results_can_be_awaited_by_coroutines() -> None:
    assert rpc.rpc_sync("worker1", add_squares, args=(20,)) == sum(map(square, range(20)))
    assert asyncio.run(add_squares(20)) == sum(map(square, range(20)))
    with pytest.raises(BlockingCallError):
        rpc.rpc_sync("worker1", block_in_coroutine)
    with pytest.raises(ValueError, match="not 1"):
        rpc.rpc_sync("worker1", fail_in_coroutine)


# ---- workers that die and come back


def die_with(item: int, victim: int, name: str = "worker1") -> tuple[int, str]:
    """The worker with that name dies when it gets that item, or, if it is negative, any."""
    worker = current_worker()
    if worker.name == name and victim in (-1, item):
        worker.die()
    return item, worker.name


def map_to_the_end(victim: int, name: str, **options: Any) -> list[Any]:
    return outcomes(rpc.map(functools.partial(die_with, victim=victim, name=name), range(6), **options))


def test_the_item_of_a_lost_worker_fails_and_the_others_have_results(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3)
    found = ask(workers[0], map_to_the_end, -1, "worker1")
    assert sorted(map(str, found[1:])) == [f"({item}, 'worker2')" for item in range(1, 6)]
    assert found[0] == "WorkerLostError"
    assert ask(workers[0], map_to_the_end, -1, "worker1") == [(item, "worker2") for item in range(6)]
    dismiss(workers)


def test_with_retries_another_worker_computes_the_item_of_a_lost_one(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 4)
    found = ask(workers[0], functools.partial(map_to_the_end, -1, "worker1", retries=1))
    assert [item for item, _ in found] == list(range(6))
    assert {name for _, name in found} <= {"worker2", "worker3"}
    dismiss(workers)


def fail_with_all_gone() -> str:
    results = rpc.map(functools.partial(die_with, victim=-1), range(3), workers=["worker1"], retries=5)
    with pytest.raises(WorkerLostError, match="no worker is left for it, of 'worker1'") as caught:
        next(results)
    assert caught.value.worker == "worker1"
    assert outcomes(results) == ["WorkerLostError"] * 2
    return str(caught.value)


def test_each_item_fails_when_no_worker_is_left(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2)
    ask(workers[0], fail_with_all_gone)
    dismiss(workers)


def raise_loss_of_another(item: int) -> int:
    raise WorkerLostError("worker 'database' is gone", "database", "it was switched off")


@in_standing_group(3)
def test_an_error_that_the_function_raises_is_no_loss() -> None:
    with pytest.raises(WorkerLostError, match="database"):
        next(rpc.map(raise_loss_of_another, range(3), retries=3))


def die_once(item: int) -> int:
    """The worker that gets item 2 first dies."""
    died = Path("died")
    if item == 2 and not died.exists():
        died.touch()
        current_worker().die()
    return item


class Tagged:
    """A number that can be sent only in the context of the thread that calls ``map_over_deaths``."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        assert _tag.get() == "the caller's"
        return int, (self.number,)


def map_over_deaths(**options: Any) -> list[Any]:
    _tag.set("the caller's")
    items = [Tagged(number) for number in range(5)]
    return outcomes(rpc.map(die_once, items, workers=["worker1"], timeout=50, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("retries", "third"), [(0, "WorkerLostError"), (1, 2)])
def test_in_a_dynamic_group_items_wait_for_a_worker_to_come_back(
    run_workers: RunWorkers, retries: int, third: object
) -> None:
    workers = start_followers(run_workers, 2, dynamic=True)
    workers[0].tell("order", functools.partial(map_over_deaths, retries=retries))
    workers[1].result()  # it has died
    add_follower(workers, dynamic=True, name="worker1", rank=1)
    assert workers[0].wait_for("done") == [0, 1, third, 3, 4]
    dismiss(workers)
