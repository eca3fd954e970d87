"""The caller's end of a call: exactly one completion, whoever waits, and Ctrl-C takes effect at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import uvloop

from rpc.agent.calls import PendingCall
from rpc.agent.futures import Future
from rpc.agent.waiting import wait_all
from rpc.errors import NotInitializedError, RpcTimeoutError
from rpc.wire.frames import Frame
from tests.support.answering import Owner, fail, when_waiting
from tests.support.streams import SOON, until

# ---- what is left of a call


@pytest.mark.parametrize("error", [KeyError("remote"), OSError(2, "remote"), None])
def test_a_future_that_has_failed_keeps_nothing_of_those_who_waited(
    owner: Owner, error: Exception | None
) -> None:
    class Held:
        pass

    def wait() -> tuple[list[Future[Any]], weakref.ref[Held]]:
        held, call = Held(), owner.call(timeout=0.01)
        future = Future.for_call(call)
        following = future.then(lambda done: done.value())
        if error is not None:
            owner.answer(call, error)
        for each in (future, future, following):
            with pytest.raises((RpcTimeoutError if error is None else type(error), RuntimeError)):
                each.wait()
        return [future, following], weakref.ref(held)

    futures, held = wait()
    owner.open.clear()
    gc.collect()
    assert all(each.done() for each in futures)
    assert held() is None


class Speechless(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise AttributeError("detail")


@pytest.mark.parametrize("base", [Speechless, type("End", (Speechless, SystemExit), {})])
def test_an_error_without_a_text_completes_all_that_wait_for_it(base: type[BaseException]) -> None:
    def fail(_: object) -> None:
        raise base

    future: Future[None] = Future()
    after = future.then(fail)
    future.set_result(None)
    with pytest.raises(RuntimeError, match=rf"{base.__name__}: \(its text is not available\)"):
        after.wait(SOON)


# ---- waiting without a future, as rpc_sync does


def test_a_reply_that_comes_with_the_timeout_still_counts(
    owner: Owner, other_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = owner.call(timeout=0.001)

    def too_late(_: PendingCall) -> None:  # the loop has just taken it out of the table
        other_thread.submit(owner.answer, call, 42)

    monkeypatch.setattr(owner, "expire", too_late)
    assert call.result() == 42


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("all_gather", "all_gather"),
        (wait_all, "wait_all"),
        (Owner, "Owner"),
        (len, "len"),
        (torch.nn.functional.relu, "relu"),
        ([].append, "list.append"),
    ],
    ids=str,
)
def test_what_was_asked_is_named_without_running_code_of_the_users(
    owner: Owner, what: object, text: str
) -> None:
    call = owner.call(timeout=1.5, what=what)
    assert call.asked == text
    assert str(call.timeout_error()).startswith(
        f"RPC ran for more than its timeout of 1500 ms: {text} on worker"
    )


# ---- futures: who completes


def test_a_waiting_thread_decodes_and_completes_itself(
    owner: Owner, other_thread: ThreadPoolExecutor
) -> None:
    call, future = owner.future()
    other_thread.submit(when_waiting(call, owner.answer, call, 42))
    assert future.wait() == 42
    assert owner.decoding_threads == [threading.current_thread()]
    assert future.done()
    assert future.value() == 42


def test_a_reply_that_was_there_before_the_future_completes_it(owner: Owner) -> None:
    call = owner.call()
    owner.answer(call, 42)
    future = Future.for_call(call)
    until(future.done)
    assert future.value() == 42


def test_waiters_and_the_executor_may_race_for_the_reply(
    owner: Owner, other_thread: ThreadPoolExecutor
) -> None:
    for _ in range(300):
        owner.decoded.clear()
        call, future = owner.future()
        told: list[object] = []
        future.add_done_callback(told.append)
        answering = other_thread.submit(owner.answer, call, 42)
        waiting = [other_thread.submit(future.wait) for _ in range(2)]
        assert future.wait() == 42
        assert [each.result(SOON) for each in waiting] == [42, 42]
        answering.result(SOON)
        assert owner.decoded == [call.call_id]
        assert len(told) == 1


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("gone")])
def test_errors_that_would_end_the_thread_arrive_as_runtime_errors(
    owner: Owner, error: BaseException
) -> None:
    call, future = owner.future()
    owner.answer(call, lambda: fail(error))
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: ") as caught:
        future.wait()
    assert caught.value.__cause__ is error


# ---- then


def test_then_refuses_what_cannot_be_called(owner: Owner) -> None:
    _, future = owner.future()
    with pytest.raises(TypeError):
        future.then("not callable")  # type: ignore[arg-type]


def test_a_thread_that_waits_is_not_held_up_by_a_callback_that_another_waiter_runs(
    owner: Owner, other_thread: ThreadPoolExecutor
) -> None:
    call, future = owner.future()
    go_on = threading.Event()
    future.add_done_callback(lambda _: go_on.wait(SOON))  # type: ignore[arg-type]
    waiting = [other_thread.submit(future.wait) for _ in range(4)]
    until(lambda: len(call.awaited._waiters) == 4)
    owner.answer(call, 42)
    until(lambda: sum(each.done() for each in waiting) == 3)
    go_on.set()
    assert [each.result(SOON) for each in waiting] == [42] * 4


# ---- await


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_future_can_be_awaited_from_any_asyncio_loop(
    owner: Owner, new_loop: Callable[[], asyncio.AbstractEventLoop], other_thread: ThreadPoolExecutor
) -> None:
    async def use() -> list[int]:
        call, future = owner.future()
        tasks = [asyncio.ensure_future(awaited(future)) for _ in range(3)]
        await asyncio.sleep(0)
        owner.answer(call, 41)
        values = await asyncio.gather(*tasks)
        assert await future == 41  # again, when it is done
        return [*values, await future.then(lambda done: done.value() + 1)]

    async def awaited(future: Future[int]) -> int:
        return await future

    def run() -> list[int]:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(use())

    here = run()
    there = other_thread.submit(run).result(SOON)
    assert here == there == [41, 41, 41, 42]


def test_a_cancelled_await_leaves_the_future_alone(owner: Owner) -> None:
    async def use() -> int:
        call, future = owner.future()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await future
        owner.answer(call, 42)
        value: int = await future
        return value

    assert asyncio.run(use()) == 42


# ---- Ctrl-C


@pytest.mark.usefixtures("deferred")
def test_ctrl_c_at_any_moment_loses_no_completion(owner: Owner, other_thread: ThreadPoolExecutor) -> None:
    chance = random.Random(7)
    main = threading.main_thread().ident or 0
    waited = 0
    for index in range(300):
        call, future = owner.future()
        following = future.then(lambda done: done.value())
        started = threading.Event()

        def disturb(
            call: PendingCall = call,
            started: threading.Event = started,
            index: int = index,
            delay: int = chance.randrange(60),
        ) -> None:
            started.wait(SOON)
            if index % 2:
                owner.answer(call, index)
            for _ in range(delay):
                pass
            signal.pthread_kill(main, signal.SIGINT)
            if not index % 2:
                owner.answer(call, index)

        disturbing = other_thread.submit(disturb)
        try:
            started.set()
            assert future.wait() == index
            waited += 1
            threading.Event().wait(SOON)
        except KeyboardInterrupt:
            pass
        disturbing.result(SOON)
        until(following.done)
        with contextlib.suppress(RuntimeError):  # it may have hit the decoding or the callback
            assert following.value() == index
    assert waited < 300


def press_ctrl_c(_: object = None) -> None:
    """What Ctrl-C does at this moment, on the main thread."""
    raise KeyboardInterrupt


def test_ctrl_c_in_a_callback_that_runs_at_once_is_raised_by_then(owner: Owner) -> None:
    call, future = owner.future()
    owner.answer(call, 1)
    until(future.done)
    with pytest.raises(KeyboardInterrupt):
        future.then(press_ctrl_c)
    _, later = owner.future()
    owner.answer(owner.open[2], 2)
    assert later.wait() == 2


def test_ctrl_c_in_a_done_callback_is_raised_by_who_adds_it_or_waits(owner: Owner) -> None:
    done: Future[int] = Future()
    done.set_result(1)
    with pytest.raises(KeyboardInterrupt):
        done.add_done_callback(press_ctrl_c)
    call, future = owner.future()
    future.add_done_callback(press_ctrl_c)
    call.settle(Frame(6, call.call_id, {"value": 42}, []))
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert future.wait() == 42


def test_ctrl_c_in_decoding_and_in_a_callback_is_raised_once(owner: Owner) -> None:
    call, future = owner.future()
    future.then(press_ctrl_c)
    call.settle(Frame(6, call.call_id, {"value": press_ctrl_c}, []))
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    call, later = owner.future()
    call.settle(Frame(6, call.call_id, {"value": 2}, []))
    assert later.wait() == 2


class Unlike(OSError):
    """Cannot be copied: its class takes other arguments than it has, and it is more than these."""

    def __init__(self) -> None:
        super().__init__("unlike", "others")


def test_what_cannot_be_copied_is_raised_itself(owner: Owner) -> None:
    call, future = owner.future()
    error = Unlike()
    error.__cause__ = cause = ValueError("why")
    call.settle(error)
    for _ in range(2):
        with pytest.raises(Unlike) as caught:
            future.wait()
        assert caught.value.__cause__ is cause


def test_a_callback_that_calls_after_its_worker_has_ended_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def call(_: object) -> None:
        raise NotInitializedError("RPC has not been initialized")

    future: Future[None] = Future()
    following = future.then(call)
    future.set_result(None)
    with pytest.raises(RuntimeError, match="NotInitializedError"):
        following.wait()
    assert caplog.records == []
