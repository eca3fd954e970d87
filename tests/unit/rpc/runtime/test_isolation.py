"""Each task of an isolating loop has modes of its own; each function of an isolating pool, the defaults."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rpc.runtime.isolation import IsolatingThreadPool, isolate_tasks
from rpc.runtime.loop import new_loop
from rpc.runtime.stepwise import StepwiseCoroutine
from tests.support.modes import DEFAULTS, USER, leave_everything, look

needs_eager_tasks = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has eager tasks")


@pytest.fixture(params=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    """An isolating loop of either kind."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as where it is not installed
    with asyncio.Runner(loop_factory=new_loop) as running:
        isolate_tasks(running.get_loop())
        yield running


def grad() -> bool:
    return torch.is_grad_enabled()


def seen_by_a_task() -> dict[str, Any]:
    """What ``look`` sees, less the decimal context, which asyncio's tasks may share."""
    return look() | {"decimal": DEFAULTS["decimal"]}


def test_blocks_that_overlap_leave_nothing(runner: asyncio.Runner) -> None:
    first_inside, second_inside, first_over = (asyncio.Event() for _ in range(3))

    async def first() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            first_inside.set()
            await second_inside.wait()
        first_over.set()

    async def second() -> bool:
        await first_inside.wait()
        with torch.no_grad():
            second_inside.set()
            await first_over.wait()
            return grad()

    async def both() -> Any:
        seen = await asyncio.gather(first(), second())
        return seen, seen_by_a_task()

    assert runner.run(both()) == ([None, False], DEFAULTS)


@pytest.mark.parametrize("end", ["returns", "raises", "is cancelled"])
def test_what_a_task_leaves_ends_with_it(runner: asyncio.Runner, end: str) -> None:
    async def leave() -> None:
        leave_everything()
        if end == "raises":
            raise LookupError
        if end == "is cancelled":
            await asyncio.Event().wait()

    async def look_after() -> dict[str, Any]:
        task = asyncio.create_task(leave())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return seen_by_a_task()

    assert runner.run(look_after()) == DEFAULTS


def test_a_task_begins_with_the_modes_of_the_one_that_creates_it(runner: asyncio.Runner) -> None:
    async def parent() -> tuple[tuple[bool, ...], bool]:
        with torch.no_grad():
            inside = await asyncio.gather(child(), child())
            outlives = asyncio.create_task(child())
        return tuple(inside), await outlives

    async def child() -> bool:
        await asyncio.sleep(0)
        return grad()

    assert runner.run(parent()) == ((False, False), False)


@needs_eager_tasks
def test_an_eager_task_leaves_nothing_to_the_one_that_creates_it(runner: asyncio.Runner) -> None:
    async def leave() -> None:
        torch.set_grad_enabled(False)
        await asyncio.sleep(0)

    async def parent() -> bool:
        loop = asyncio.get_running_loop()
        make: Any = loop.get_task_factory()
        task = make(loop, leave(), eager_start=True)
        seen = grad()
        await task
        return seen and grad()

    assert runner.run(parent())


def test_what_a_callback_of_the_loop_leaves_reaches_no_task(runner: asyncio.Runner) -> None:
    loop = runner.get_loop()
    left = asyncio.Event()
    seen: list[bool] = []

    def leave() -> None:
        torch.set_grad_enabled(False)
        left.set()
        begun.append(loop.create_task(see()))

    async def see() -> None:
        seen.append(grad())

    begun: list[asyncio.Task[None]] = []

    async def waiting() -> None:
        loop.call_soon(leave)
        await left.wait()
        seen.append(grad())
        await asyncio.wait(begun)

    try:
        runner.run(waiting())
        assert seen == [True, True]
    finally:
        torch.set_grad_enabled(True)


def test_functions_that_tasks_run_on_threads_leave_nothing_there(runner: asyncio.Runner) -> None:
    async def on_threads() -> dict[str, Any]:
        asyncio.get_running_loop().set_default_executor(IsolatingThreadPool(1))
        await asyncio.to_thread(leave_everything)
        return await asyncio.to_thread(seen_by_a_task)

    assert runner.run(on_threads()) == DEFAULTS


def test_a_pool_gives_each_function_a_context_of_its_own() -> None:
    with IsolatingThreadPool(1) as pool:
        pool.submit(USER.set, "somebody").result()
        pool.submit(leave_everything).result()
        assert pool.submit(look).result() == DEFAULTS


def test_a_task_says_what_it_runs(runner: asyncio.Runner) -> None:
    async def named() -> str:
        task = asyncio.current_task()
        assert task is not None
        coroutine: Any = task.get_coro()
        return (
            f"{coroutine.__qualname__} {coroutine.cr_frame.f_code.co_name} {task.get_stack()[0].f_lineno > 0}"
        )

    assert runner.run(named()).endswith("named named True")


def test_what_is_no_coroutine_is_refused_as_ever(runner: asyncio.Runner) -> None:
    nothing: Any = 5

    async def begin() -> None:
        asyncio.get_running_loop().create_task(nothing)

    with pytest.raises(TypeError, match="a coroutine was expected"):
        runner.run(begin())


def test_an_error_thrown_in_is_met_with_the_modes_of_the_task(runner: asyncio.Runner) -> None:
    seen: list[bool] = []

    async def cancelled() -> None:
        with torch.no_grad():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(grad())
                raise

    async def cancel() -> None:
        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        seen.append(grad())

    runner.run(cancel())
    assert seen == [False, True]


def test_the_end_of_a_coroutine_that_is_closed_is_a_step_as_well() -> None:
    steps: list[Callable[..., Any]] = []
    coroutine = StepwiseCoroutine(asyncio.sleep(0), lambda advance, *args: steps.append(advance))
    coroutine.close()
    assert len(steps) == 1
    steps[0]()
