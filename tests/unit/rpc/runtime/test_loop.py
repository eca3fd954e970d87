"""The thread that runs an asyncio loop: it serves other threads, never waits for them, and ends when told."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from rpc.agent.futures import Future
from rpc.errors import BlockingCallError
from rpc.runtime.loop import LoopThread
from tests.support.interrupting import interrupted
from tests.support.streams import SOON, until


@pytest.fixture(params=["uvloop", "asyncio"])
def thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    """A running loop of either kind."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as where it is not installed
    running = LoopThread("test-loop", "this thread must not block")
    assert isinstance(running.loop, uvloop.Loop) == (request.param == "uvloop")
    yield running
    assert running.stop()


async def endless(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_what_takes_too_long_is_cancelled(thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        thread.wait_for(wait(), timeout=0.01)
    assert cancelled.wait(SOON)


def test_ctrl_c_ends_the_waiting_and_cancels_what_was_waited_for(thread: LoopThread) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        try:
            await endless(begun)
        finally:
            cancelled.set()

    interrupted(lambda: thread.wait_for(wait()), when=begun.is_set)
    assert cancelled.wait(SOON)


def test_no_blocking_call_is_made_on_the_thread_itself(thread: LoopThread) -> None:
    never: Future[int] = Future()

    def block_in_many_ways() -> None:
        for block in (
            never.wait,
            lambda: thread.call(int),
            lambda: thread.wait_for(endless(threading.Event())),
        ):
            with pytest.raises(BlockingCallError, match="this thread must not block"):
                block()

    thread.call(block_in_many_ways)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_nothing_that_a_callback_raises_ends_the_thread(
    thread: LoopThread, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("on purpose")

    async def fail_in_a_task() -> None:
        fail()

    thread.loop.call_soon_threadsafe(fail)
    asyncio.run_coroutine_threadsafe(fail_in_a_task(), thread.loop)
    assert thread.call(lambda: 42) == 42


# ---- stopping


def test_stop_cancels_what_still_runs_and_who_waits_for_it_is_told(thread: LoopThread) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as other_thread:
        waiting = other_thread.submit(thread.wait_for, endless(begun))
        assert begun.wait(SOON)
        assert thread.stop()
        with pytest.raises(RuntimeError, match="the thread test-loop has ended"):
            waiting.result(SOON)


def test_stop_can_be_called_by_several_threads_and_again(thread: LoopThread) -> None:
    everybody = threading.Barrier(4)

    def stop(_: int) -> bool:
        everybody.wait(SOON)
        return thread.stop()

    with ThreadPoolExecutor(4) as other_threads:
        assert list(other_threads.map(stop, range(4))) == [True] * 4
    assert thread.stop()


def test_stop_may_be_called_on_the_thread_itself(thread: LoopThread) -> None:
    assert thread.call(thread.stop) is False
    until(lambda: "test-loop" not in [each.name for each in threading.enumerate()])


def test_a_task_that_will_not_be_cancelled_does_not_keep_the_thread(thread: LoopThread) -> None:
    begun = threading.Event()

    async def stubborn() -> None:
        begun.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    asyncio.run_coroutine_threadsafe(stubborn(), thread.loop)
    assert begun.wait(SOON)
    assert thread.stop(timeout=4.0)  # of which it has half


def test_stop_gives_up_on_a_thread_that_is_blocked(thread: LoopThread) -> None:
    blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait(SOON)

    thread.loop.call_soon_threadsafe(block)
    assert blocked.wait(SOON)
    assert thread.stop(timeout=0.01) is False
    go_on.set()
    assert thread.stop()


def test_after_the_end_calls_are_refused_and_nothing_is_forgotten(thread: LoopThread) -> None:
    thread.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="closed"):
            thread.call(int)
        gc.collect()


def test_nobody_who_calls_while_it_stops_waits_for_ever(thread: LoopThread) -> None:
    outcomes: list[Any] = []
    everybody = threading.Barrier(5)

    def call_on_and_on() -> None:
        everybody.wait(SOON)
        try:
            while True:
                thread.call(int)
        except RuntimeError as error:
            outcomes.append(str(error))

    callers: list[Callable[[], None]] = [call_on_and_on] * 4
    threads = [threading.Thread(target=caller) for caller in callers]
    for each in threads:
        each.start()
    everybody.wait(SOON)
    assert thread.stop()
    for each in threads:
        each.join(SOON)
    assert len(outcomes) == 4


def test_asynchronous_generators_are_closed(thread: LoopThread) -> None:
    closed = threading.Event()

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    kept: list[Any] = []

    async def use() -> None:
        generator = numbers()
        kept.append(generator)
        await generator.__anext__()

    thread.wait_for(use())
    assert thread.stop()
    assert closed.is_set()
