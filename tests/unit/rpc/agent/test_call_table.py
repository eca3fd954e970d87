"""The table of calls: every reply finds its call, and every deadline is kept with one alarm."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.futures import Future
from rpc.errors import RpcTimeoutError
from rpc.runtime.loop import LoopThread
from rpc.runtime.tasks import Task
from rpc.wire.frames import Frame, Kind
from tests.support.answering import table_of
from tests.support.clockwork import Clockwork
from tests.support.interrupting import interrupted_at_check
from tests.support.members import peer
from tests.support.streams import SOON, until


class Owner:
    """Notes the futures that it would have completed by an executor."""

    def __init__(self) -> None:
        self.settled: list[Future[Any]] = []

    def run_soon(self, tasks: Sequence[Task]) -> None:
        self.settled += [cast("Any", complete).__self__ for complete, _ in tasks]


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    monkeypatch.setattr("rpc.agent.calls.monotonic", lambda: made.now)
    return made


@pytest.fixture
def owner() -> Any:
    return Owner()


@pytest.fixture
def table(clockwork: Any, owner: Any) -> CallTable:
    return table_of(clockwork, owner.run_soon)


def watched(table: CallTable, timeout: float) -> PendingCall:
    """A call with a future, as ``rpc_async`` makes it."""
    call = table.open(peer(), "what", timeout, PendingCall)
    Future.for_call(call)
    return call


def reply_to(call_id: int) -> Frame:
    return Frame(Kind.REPLY, call_id, {}, [b""])


def test_a_call_ends_when_its_deadline_passes_and_not_before(
    table: CallTable, clockwork: Any, owner: Any
) -> None:
    call = watched(table, 2.0)
    clockwork.advance(1.99)
    assert not call.done()
    clockwork.advance(0.02)
    assert isinstance(call.outcome, RpcTimeoutError)
    assert str(call.outcome).startswith(
        "RPC ran for more than its timeout of 2000 ms: what on worker 'callee'"
    )
    assert owner.settled == [call.future]
    assert len(table) == 0


def test_a_thousand_calls_in_flight_share_one_alarm(table: CallTable, clockwork: Clockwork) -> None:
    for _ in range(1000):
        watched(table, 60.0)
        clockwork.advance(0.001)
    assert clockwork.woken == 1
    assert clockwork.ringing() == [60.0]


def test_an_earlier_deadline_moves_the_alarm(table: CallTable, clockwork: Clockwork) -> None:
    late, early = watched(table, 60.0), watched(table, 1.0)
    clockwork.advance(0)
    assert clockwork.ringing() == [1.0]
    clockwork.advance(2.0)
    assert early.done()
    assert not late.done()
    assert clockwork.ringing() == [60.0]


def test_the_alarm_is_not_set_again_once_all_calls_were_answered(
    table: CallTable, clockwork: Any, owner: Any
) -> None:
    for _ in range(10):
        assert table.take(watched(table, 5.0).call_id) is not None
    clockwork.advance(10.0)
    assert clockwork.ringing() == []
    assert owner.settled == []
    call = watched(table, 5.0)
    clockwork.advance(6.0)
    assert call.done()


def test_a_blocking_call_is_left_to_the_thread_that_waits(table: CallTable, clockwork: Clockwork) -> None:
    blocking = table.open(peer(), "blocking", 1.0, PendingCall)
    watched(table, 2.0)
    clockwork.advance(3.0)
    assert not blocking.done()
    assert list(table.waiting()) == [blocking]


def test_a_thread_that_waits_for_the_future_gets_the_timeout_itself(
    table: CallTable, clockwork: Any, owner: Any
) -> None:
    call = watched(table, 2.0)
    future = call.future
    assert future is not None
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(future.wait)
        until(lambda: call.awaited._waiters)
        clockwork.advance(3.0)
        with pytest.raises(RpcTimeoutError):
            waiting.result(SOON)
    assert owner.settled == []


class Lasting(PendingCall):
    keeps_place = True

    def expired(self) -> bool:
        self.deadline = float("inf")
        return super().expired()


def test_a_call_that_keeps_its_place_still_gets_its_late_reply(
    table: CallTable, clockwork: Clockwork
) -> None:
    call = table.open(peer(), "what", 1.0, Lasting)
    table.watch(call)
    clockwork.advance(5.0)
    assert isinstance(call.outcome, RpcTimeoutError)
    assert table.take(call.call_id) is call
    assert clockwork.ringing() == []


@pytest.mark.usefixtures("deferred")
def test_ctrl_c_while_the_alarm_is_set_lets_no_deadline_pass(clockwork: Any, owner: Any) -> None:
    for number in itertools.count(1):
        table = table_of(clockwork, owner.run_soon)
        first = table.open(peer(), "what", 2.0, PendingCall)
        interrupted = interrupted_at_check(number, functools.partial(table.watch, first))
        clockwork.advance(2.5)
        assert first.done() == first.watched, number
        second = watched(table, 1.0)
        clockwork.advance(1.5)
        assert second.done(), number
        if not interrupted:
            break
    assert number > 2


# ---- calls that were given up


def test_a_call_given_up_counts_as_under_way_until_its_answer_comes_late(
    table: CallTable, clockwork: Clockwork
) -> None:
    timed_out, interrupted = watched(table, 1.0), table.open(peer(), "blocking", 0, PendingCall)
    clockwork.advance(2.0)
    assert table.give_up(interrupted)
    assert len(table) == 0
    assert table.unanswered() == 2
    for call in (timed_out, interrupted):
        assert table.take(call.call_id) is None
        table.received(call.peer, reply_to(call.call_id))
    assert table.unanswered() == 0
    table.received(peer(), reply_to(12345))  # never heard of


def test_a_call_given_up_no_longer_counts_when_its_callee_is_gone(table: CallTable) -> None:
    here, there = peer("here", 1), peer("there", 2)
    for to in (here, there):
        table.give_up(table.open(to, "what", 0, PendingCall))
    assert table.take_all(here) == []
    assert table.unanswered() == 1
    there.gone("it died")
    table.take_all(there)
    late = table.open(there, "what", 0, PendingCall)
    assert table.give_up(late)
    assert table.unanswered() == 0


def test_a_call_that_has_just_ended_cannot_be_given_up(table: CallTable) -> None:
    call = table.open(peer(), "what", 0, PendingCall)
    assert table.take(call.call_id) is call
    assert not table.give_up(call)
    assert table.unanswered() == 0


# ---- with a real loop


def test_no_deadline_is_missed_when_many_threads_make_calls(loop: LoopThread, owner: Any) -> None:
    table = table_of(loop.loop, owner.run_soon)
    everybody = threading.Barrier(8)

    def make(thread: int) -> None:
        everybody.wait(SOON)
        for index in range(100):
            watched(table, 0.001 * (1 + (thread * 7 + index * 3) % 11))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(make, range(8))) == [None] * 8
    until(lambda: len(owner.settled) == 800)
    assert len(table) == 0
