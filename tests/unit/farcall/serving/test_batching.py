"""Calls that come together are run as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from farcall.serving.batching import Batcher
from farcall.serving.endpoint import Batching

NEVER = 3600.0


class Model:
    """Doubles its argument, and notes how many rows it was called with."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    async def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        (given,) = [*args, *kwargs.values()]
        self.rows.append(len(given))
        if (given < 0).any():
            raise ValueError("below 0")
        return {"twice": given * 2, "rows": (given.sum(1),)}


def at_once(tell: Callable[[], None]) -> None:
    tell()


def batcher(
    model: Any, size: int = 4, delay: float = NEVER, when_free: Callable[..., None] = at_once
) -> tuple[Batcher, list[int]]:
    seen: list[int] = []
    return Batcher(Batching(size, delay), model, seen.append, when_free), seen


def rows(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count, 3), value)


async def test_a_batch_that_is_not_full_runs_when_its_first_call_has_waited() -> None:
    model = Model()
    joined, _ = batcher(model, delay=0.001)
    await asyncio.gather(joined.call([rows(1)], {}), joined.call([rows(2)], {}))
    assert model.rows == [3]


async def test_a_batch_that_has_no_place_to_run_takes_more_calls() -> None:
    model = Model()
    asked: asyncio.Future[Callable[[], None]] = asyncio.get_running_loop().create_future()
    joined, _ = batcher(model, delay=0.0, when_free=asked.set_result)
    first = asyncio.create_task(joined.call([rows(1)], {}))
    tell = await asked
    second = asyncio.create_task(joined.call([rows(2)], {}))
    await asyncio.sleep(0)
    tell()
    await asyncio.gather(first, second)
    assert model.rows == [3]


async def test_a_batch_that_is_full_before_there_is_a_place_is_not_closed_again() -> None:
    model = Model()
    asked: asyncio.Future[Callable[[], None]] = asyncio.get_running_loop().create_future()
    joined, _ = batcher(model, delay=0.0, when_free=asked.set_result)
    calls = [asyncio.create_task(joined.call([rows(1)], {})) for _ in range(3)]
    tell = await asked
    await asyncio.gather(joined.call([rows(1)], {}), *calls)
    tell()
    assert model.rows == [4]


async def test_a_call_that_does_not_fit_begins_the_next_batch() -> None:
    model = Model()
    joined, _ = batcher(model, delay=0.001)
    await asyncio.gather(*(joined.call([rows(3)], {}) for _ in range(2)))
    assert model.rows == [3, 3]


async def test_a_call_of_many_rows_runs_alone() -> None:
    model = Model()
    joined, _ = batcher(model)
    assert len((await joined.call([rows(9)], {}))["twice"]) == 9


@pytest.mark.parametrize("other", [rows(2).double(), torch.ones(2, 5)], ids=["dtype", "size"])
async def test_calls_of_other_kinds_are_not_joined(other: torch.Tensor) -> None:
    model = Model()
    joined, _ = batcher(model, delay=0.001)
    await asyncio.gather(
        joined.call([rows(2)], {}), joined.call([other], {}), joined.call([], {"x": rows(2)})
    )
    assert model.rows == [2, 2, 2]


async def test_an_error_is_that_of_the_call_that_has_it() -> None:
    model = Model()
    joined, _ = batcher(model)
    calls = (joined.call([rows(1, value)], {}) for value in (1, -1, 2, 3))
    first, wrong, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(wrong, ValueError)
    assert all(isinstance(result, dict) for result in (first, *others))


async def test_a_call_that_is_given_up_is_left_out() -> None:
    model = Model()
    joined, _ = batcher(model)
    gone = asyncio.create_task(joined.call([rows(1)], {}))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*(joined.call([rows(1)], {}) for _ in range(3)))
    assert model.rows == [3]


async def test_a_result_with_other_rows_is_an_error() -> None:
    async def summed(args: Sequence[Any], _: Mapping[str, Any]) -> Any:
        return args[0].sum(0)

    joined, _ = batcher(summed, size=2)
    results = await asyncio.gather(*(joined.call([rows(1)], {}) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(result, TypeError) and "as many rows" in str(result) for result in results)


class Waiting:
    """Fails for many rows; else waits until it is cancelled, and tells with how many rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.cancelled: asyncio.Queue[int] = asyncio.Queue()

    async def __call__(self, args: Sequence[Any], _: Mapping[str, Any]) -> Any:
        count = len(args[0])
        if count > self._most:
            raise ValueError("too many rows")
        self.begun.put_nowait(count)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(count)
            raise


async def test_a_batch_that_runs_is_cancelled_when_its_last_call_is_given_up() -> None:
    model = Waiting(most=2)
    joined, _ = batcher(model, size=2)
    calls = [asyncio.create_task(joined.call([rows(1)], {})) for _ in range(2)]
    assert await model.begun.get() == 2
    calls[0].cancel()
    await asyncio.wait([calls[0]])
    assert model.cancelled.empty()
    calls[1].cancel()
    assert await asyncio.wait_for(model.cancelled.get(), 60) == 2


async def test_a_call_that_runs_alone_after_its_batch_has_failed_is_cancelled_alone() -> None:
    model = Waiting(most=1)
    joined, _ = batcher(model, size=3)
    calls = [asyncio.create_task(joined.call([rows(1)], {})) for _ in range(3)]
    for call in calls:
        assert await model.begun.get() == 1
        call.cancel()
        assert await asyncio.wait_for(model.cancelled.get(), 60) == 1


async def test_a_full_batch_runs_at_once_and_each_gets_its_part() -> None:
    model = Model()
    joined, seen = batcher(model)
    results = await asyncio.gather(*(joined.call([rows(1, value)], {}) for value in range(4)))
    assert model.rows == [4]
    assert seen == [4]
    assert [result["twice"].tolist() for result in results] == [[[value * 2.0] * 3] for value in range(4)]
    assert [result["rows"][0].tolist() for result in results] == [[value * 3.0] for value in range(4)]
