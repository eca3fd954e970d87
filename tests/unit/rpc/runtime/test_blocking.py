"""Waiting for calls: for several at once, never where it must not be, and Ctrl-C takes effect at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpc.agent.futures import Future, collected_futures, wait_all, wait_futures
from rpc.errors import BlockingCallError
from rpc.runtime.blocking import forbid_blocking
from tests.support.answering import Owner, fail, when_waiting
from tests.support.ctrl_c import CtrlC
from tests.support.streams import SOON, until

# ---- wait_all and waiting for several


def test_wait_all_waits_for_what_was_collected_on_this_thread(owner: Owner) -> None:
    pairs = [owner.future() for _ in range(3)]
    with wait_all():
        collected_futures.future_list.extend(future for _, future in pairs)
        for call, _ in pairs:
            owner.answer(call, 1)
    assert all(future.done() for _, future in pairs)
    assert not hasattr(collected_futures, "future_list")


def test_wait_all_can_be_nested(owner: Owner) -> None:
    outer_call, outer_future = owner.future()
    inner_call, inner_future = owner.future()
    with wait_all():
        collected_futures.future_list.append(outer_future)
        with wait_all():
            collected_futures.future_list.append(inner_future)
            owner.answer(inner_call, 1)
        assert inner_future.done()
        assert collected_futures.future_list == [outer_future]
        owner.answer(outer_call, 1)
    assert outer_future.done()


def test_wait_all_raises_the_first_error_without_waiting_for_the_others(owner: Owner) -> None:
    failing, failing_future = owner.future()
    _, endless = owner.future()

    def use() -> None:
        with wait_all():
            collected_futures.future_list.extend([endless, failing_future])
            owner.answer(failing, lambda: fail(KeyError("remote")))

    with pytest.raises(KeyError, match="remote"):
        use()
    assert not hasattr(collected_futures, "future_list")


def test_wait_all_does_not_wait_when_its_block_fails(owner: Owner) -> None:
    _, endless = owner.future()

    def use() -> None:
        with wait_all():
            collected_futures.future_list.append(endless)
            raise KeyError("in the block")

    with pytest.raises(KeyError, match="in the block"):
        use()


def test_wait_futures_returns_values_in_the_order_of_the_futures(owner: Owner) -> None:
    pairs = [owner.future() for _ in range(5)]
    for index, (call, _) in reversed(list(enumerate(pairs))):
        owner.answer(call, index)
    assert wait_futures([future for _, future in pairs]) == [0, 1, 2, 3, 4]
    assert wait_futures([]) == []


# ---- threads that must not block


def test_a_thread_that_must_not_block_cannot_wait(owner: Owner) -> None:
    call, future = owner.future()
    done_call, done_future = owner.future()
    owner.answer(done_call, 42)
    until(done_future.done)
    own: Future[int] = Future()

    def run() -> None:
        forbid_blocking("not here")
        for blocking in (future.wait, own.wait, call.result, lambda: wait_futures([done_future, future])):
            with pytest.raises(BlockingCallError, match="not here"):
                blocking()
        assert done_future.wait() == 42
        assert wait_futures([done_future]) == [42]

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result(SOON)
    assert not call._waiters


# ---- Ctrl-C


def test_ctrl_c_interrupts_result_and_gives_the_call_up(
    owner: Owner, other_thread: ThreadPoolExecutor, ctrl_c: CtrlC
) -> None:
    call = owner.call(timeout=60)
    other_thread.submit(ctrl_c.press_when, lambda: call._waiters)
    with pytest.raises(KeyboardInterrupt):
        call.result()
    assert not owner.open
    assert not call._waiters


def test_ctrl_c_interrupts_wait_and_the_future_is_completed_later(
    owner: Owner, other_thread: ThreadPoolExecutor, ctrl_c: CtrlC
) -> None:
    call, future = owner.future()
    other_thread.submit(ctrl_c.press_when, lambda: call._waiters)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert owner.open
    owner.answer(call, 42)
    assert future.wait() == 42


def test_ctrl_c_interrupts_the_wait_for_a_future_of_then(
    owner: Owner, other_thread: ThreadPoolExecutor, ctrl_c: CtrlC
) -> None:
    call, future = owner.future()
    following = future.then(lambda done: done.value() + 1)
    other_thread.submit(ctrl_c.press_in, Future.wait)
    with pytest.raises(KeyboardInterrupt):
        following.wait()
    owner.answer(call, 41)
    assert following.wait() == 42


def test_ctrl_c_interrupts_wait_all(owner: Owner, other_thread: ThreadPoolExecutor, ctrl_c: CtrlC) -> None:
    _, future = owner.future()

    def use() -> None:
        with wait_all():
            collected_futures.future_list.append(future)
            other_thread.submit(ctrl_c.press_in, wait_futures)

    with pytest.raises(KeyboardInterrupt):
        use()
    assert not hasattr(collected_futures, "future_list")


def test_ctrl_c_interrupts_while_another_thread_decodes(
    owner: Owner, other_thread: ThreadPoolExecutor, ctrl_c: CtrlC
) -> None:
    call, future = owner.future()
    decoding, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        decoding.set()
        go_on.wait(SOON)
        return 42

    owner.answer(call, slow)
    assert decoding.wait(SOON)
    other_thread.submit(ctrl_c.press_in, Future.wait)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    go_on.set()
    assert future.wait() == 42


def test_ctrl_c_while_decoding_is_raised_and_fails_the_future(
    owner: Owner, other_thread: ThreadPoolExecutor
) -> None:
    call, future = owner.future()
    other_thread.submit(
        when_waiting(call, owner.answer, call, lambda: fail(KeyboardInterrupt("in the decoder")))
    )
    with pytest.raises(KeyboardInterrupt, match="in the decoder"):
        future.wait()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt: in the decoder"):
        future.wait()


def test_ctrl_c_in_a_callback_that_a_waiting_thread_runs_is_raised_there(
    owner: Owner, other_thread: ThreadPoolExecutor, ctrl_c: CtrlC
) -> None:
    call, future = owner.future()
    endless, endless_future = owner.future()
    following = future.then(lambda _: endless_future.wait())
    other_thread.submit(when_waiting(call, owner.answer, call, 42))
    other_thread.submit(ctrl_c.press_when, lambda: endless._waiters)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert future.wait() == 42
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        following.wait()
