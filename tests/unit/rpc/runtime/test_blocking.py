"""Waiting for calls: for several at once, never where it must not be, and Ctrl-C takes effect at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from rpc.agent.futures import Future
from rpc.agent.waiting import wait_futures
from rpc.errors import BlockingCallError
from rpc.runtime.blocking import Condition, Event, this_thread, wait_for_event, wait_while
from tests.support.answering import Owner, fail, when_waiting
from tests.support.interrupting import interrupted, interrupted_at_check
from tests.support.streams import SOON, until

# ---- wait_all and waiting for several


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
        this_thread.must_not_block = "not here"
        for blocking in (future.wait, own.wait, call.result, lambda: wait_futures([done_future, future])):
            with pytest.raises(BlockingCallError, match="not here"):
                blocking()
        assert done_future.wait() == 42
        assert wait_futures([done_future]) == [42]

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result(SOON)
    assert not call.awaited._waiters


# ---- Ctrl-C


def test_ctrl_c_interrupts_result_and_gives_the_call_up(
    owner: Owner,
) -> None:
    call = owner.call(timeout=60)
    interrupted(call.result)
    assert not owner.open
    assert not call.awaited._waiters


def test_ctrl_c_interrupts_while_another_thread_decodes(
    owner: Owner,
) -> None:
    call, future = owner.future()
    decoding, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        decoding.set()
        go_on.wait(SOON)
        return 42

    owner.answer(call, slow)
    assert decoding.wait(SOON)
    interrupted(future.wait)
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
    owner: Owner, other_thread: ThreadPoolExecutor
) -> None:
    call, future = owner.future()
    endless, endless_future = owner.future()
    following = future.then(lambda _: endless_future.wait())
    other_thread.submit(when_waiting(call, owner.answer, call, 42))
    interrupted(future.wait, when=lambda: endless.awaited._waiters)
    assert future.wait() == 42
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        following.wait()


# ---- a signal at each check


@pytest.mark.usefixtures("deferred")
def test_an_interrupted_wait_leaves_no_lock_locked() -> None:
    """Python's own events and conditions would keep theirs, and block the thread that sets them."""
    number, interrupted = 0, True
    while interrupted:
        number += 1
        event, lock = Event(), threading.Lock()
        changed = Condition(lock)

        def wait(event: Event = event, lock: threading.Lock = lock, changed: Condition = changed) -> None:
            wait_for_event(event, 0.0)
            with lock:
                wait_while(lambda: True, changed, monotonic() + 0.0001)

        interrupted = interrupted_at_check(number, wait)
        assert not lock.locked()
        assert not event._waiting
        assert not changed._waiters
    assert number > 3
