"""Coroutines whose steps a function runs are, from outside, the coroutines themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from farcall.observe.worker.frames import coroutine_frames
from rpc.runtime.stepwise import StepwiseCoroutine


async def waits_for(future: asyncio.Future[int]) -> int:
    try:
        return await future
    except ValueError as error:
        raise LookupError from error


class Steps:
    """Counts the steps that are under way, and those that are over."""

    def __init__(self) -> None:
        self.under_way = 0
        self.over = 0

    def step(self, advance: Callable[..., Any], *args: Any) -> Any:
        self.under_way += 1
        try:
            return advance(*args)
        finally:
            self.under_way -= 1
            self.over += 1


async def awaiting(steps: Steps, future: asyncio.Future[int]) -> int:
    return await StepwiseCoroutine(waits_for(future), steps.step)


def test_a_value_and_an_error_pass_through_and_each_step_is_run_by_the_function() -> None:
    async def run() -> None:
        for as_task in (False, True):
            steps, future = Steps(), asyncio.get_running_loop().create_future()
            waiting: Any = StepwiseCoroutine(waits_for(future), steps.step)
            task = asyncio.ensure_future(waiting if as_task else awaiting(steps, future))
            if not as_task:
                waiting.close()
                assert steps.over == 1
                steps.over = 0
            await asyncio.sleep(0)
            assert (steps.under_way, steps.over) == (0, 1)
            future.set_result(3)
            assert await task == 3
            assert (steps.under_way, steps.over) == (0, 2)
            failing = asyncio.get_running_loop().create_future()
            failing.set_exception(ValueError())
            with pytest.raises(LookupError):
                await awaiting(Steps(), failing)

    asyncio.run(run())


def test_cancellation_reaches_the_coroutine() -> None:
    async def run() -> None:
        future = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(awaiting(Steps(), future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()

    asyncio.run(run())


def test_the_frames_of_what_is_awaited_are_seen_through_it() -> None:
    async def run() -> None:
        future = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(awaiting(Steps(), future))
        await asyncio.sleep(0)
        names = [frame.f_code.co_name for frame in coroutine_frames(task.get_coro())]
        assert names[:2] == ["awaiting", "waits_for"]
        future.set_result(1)
        await task

    asyncio.run(run())
