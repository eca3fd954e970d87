"""``Future.cancel``: the caller waits no longer, its callee is told, and nothing stays behind at either."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.serving import WAIT_SECONDS, in_worker0, open_gate, serve, wait_at_gate
from tests.support.workers import RunWorkers, Worker

_happened: list[str] = []
_changed = threading.Condition()
_made: list[weakref.ref[Any]] = []


def note(what: str) -> None:
    """At the callee: something has happened there."""
    with _changed:
        _happened.append(what)
        _changed.notify_all()


def happened(what: str = "") -> list[str]:
    """All that has happened here, once ``what`` has."""
    with _changed:
        assert _changed.wait_for(lambda: not what or what in _happened, WAIT_SECONDS), (what, _happened)
        return list(_happened)


def at_callee(what: str = "") -> list[str]:
    return rpc.rpc_sync("worker1", happened, args=(what,))


def under_way() -> int:
    """What calls may leave behind at this worker."""
    names = ("pending_calls", "given_up_calls", "postponed_requests", "cancellable_requests")
    counts = rpc.get_debug_info()
    return sum(counts[f"agent.{name}"] for name in names)


def nothing_is_left(callee: str = "worker1") -> bool:
    """Whether that becomes true, at both: the request that asks for it is one itself."""
    deadline = monotonic() + WAIT_SECONDS
    while (under_way(), rpc.rpc_sync(callee, under_way)) != (0, 1 if callee != "worker0" else 2):
        if monotonic() > deadline:
            return False
    return True


def are_freed() -> bool:
    gc.collect()
    return all(made() is None for made in _made)


def hear_notes() -> None:
    """At the callee: take the notes of ``post_note``."""
    current_agent().messages.control.on("note", lambda peer, what: note(what))


def post_note(what: str) -> None:
    """Have something happen at the callee that takes no thread there, after all earlier cancellations: a call
    may overtake those.
    """
    agent = current_agent()
    agent.messages.control.post(agent.group.peers.find("worker1"), "note", what)


def have_no_more_threads() -> None:
    """At the callee: start none when none gets on."""
    current_agent().executor._grow = lambda: True


async def sleep_long() -> None:
    note("begun")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note("cancelled")
        raise


async def refuse_to_end() -> torch.Tensor:
    note("begun")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note("cancelled")
    value: torch.Tensor = make_large("ignored")
    return value


def make_large(name: str, size: int = 1 << 20) -> Any:
    value = torch.ones(size)
    _made.append(weakref.ref(value))
    note(f"{name} made")
    return value


def make_at_gate(name: str) -> Any:
    note(f"{name} begun")
    happened(f"{name} may go on")
    return [make_large(name), rpc.RRef(1)]


class Desk:
    """An object whose making takes as long as the test likes."""

    def __init__(self) -> None:
        happened("desk wanted")

    def ask(self, *_: Any) -> None:
        note("asked")

    async def sleep(self) -> None:
        await sleep_long()


# ---- what the callee does


@pytest.mark.parametrize("callee", ["worker0", "worker1"])
@in_worker0()
def test_a_coroutine_is_cancelled(callee: str) -> None:
    future = rpc.rpc_async(callee, sleep_long)
    rpc.rpc_sync(callee, happened, args=("begun",))
    assert future.cancel()
    with pytest.raises(CancelledError, match=f"sleep_long on worker '{callee}' was cancelled by its caller"):
        future.wait()
    assert rpc.rpc_sync(callee, happened, args=("cancelled",)) == ["begun", "cancelled"]
    assert nothing_is_left(callee)


async def call_on(how: str) -> None:
    future = rpc.rpc_async("worker0", sleep_long)
    if how == "gather":
        await asyncio.gather(future, asyncio.sleep(3600))
    elif how == "collect_all":
        await torch.futures.collect_all([torch.futures.Future(), future])  # type: ignore[misc]
    elif how == "wait_for":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future, 0.01)
    else:
        await future


@pytest.mark.parametrize("how", ["await", "gather", "collect_all"])
@in_worker0()
def test_calls_that_a_cancelled_coroutine_awaits_are_cancelled(how: str) -> None:
    future = rpc.rpc_async("worker1", call_on, args=(how,))
    happened("begun")
    assert future.cancel()
    assert happened("cancelled") == ["begun", "cancelled"]
    with pytest.raises(CancelledError):
        future.wait()
    assert nothing_is_left()


@in_worker0()
def test_a_call_whose_wait_for_ends_is_cancelled() -> None:
    rpc.rpc_sync("worker1", call_on, args=("wait_for",))
    assert nothing_is_left()
    assert happened() in ([], ["begun", "cancelled"])


@in_worker0()
def test_a_coroutine_that_does_not_end_when_cancelled_answers_in_vain() -> None:
    future = rpc.rpc_async("worker1", refuse_to_end)
    at_callee("begun")
    assert future.cancel()
    at_callee("ignored made")
    assert nothing_is_left()
    assert rpc.rpc_sync("worker1", are_freed)


@in_worker0()
def test_a_coroutine_is_cancelled_whenever_the_message_comes() -> None:
    futures = [rpc.rpc_async("worker1", sleep_long) for _ in range(300)]
    assert all(future.cancel() for future in futures)
    assert nothing_is_left()  # none of them sleeps
    happened = at_callee()
    assert happened.count("begun") == happened.count("cancelled")


@in_worker0(num_worker_threads=1)
def test_a_call_that_waits_for_a_thread_is_dropped() -> None:
    rpc.rpc_sync("worker1", have_no_more_threads)
    rpc.rpc_sync("worker1", hear_notes)
    holding = rpc.rpc_async("worker1", happened, args=("go on",))
    futures = [rpc.rpc_async("worker1", note, args=(f"ran {number}",)) for number in range(3)]
    assert futures[1].cancel()
    post_note("go on")
    assert holding.wait() == ["go on"]
    futures[2].wait()
    assert at_callee() == ["go on", "ran 0", "ran 2"]
    assert nothing_is_left()


@in_worker0()
def test_a_method_that_waits_for_its_object_is_dropped() -> None:
    rpc.rpc_sync("worker1", hear_notes)
    desk = rpc.remote("worker1", Desk)
    futures = [desk.rpc_async().ask(), desk.rpc_async().sleep(), desk.rpc_async().ask(torch.ones(8))]
    assert all(future.cancel() for future in futures)
    del futures
    post_note("desk wanted")
    assert nothing_is_left()
    assert at_callee() == ["desk wanted"]
    desk.rpc_sync().ask()


@in_worker0()
def test_a_running_call_answers_in_vain_and_leaves_nothing() -> None:
    future = rpc.rpc_async("worker1", make_at_gate, args=("value",))
    at_callee("value begun")
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(timeout=1)
    rpc.rpc_sync("worker1", note, args=("value may go on",))
    at_callee("value made")
    assert nothing_is_left()
    assert rpc.rpc_sync("worker1", are_freed)


@in_worker0(transports=[backend.BETWEEN_HOSTS])
def test_a_cancelled_method_keeps_its_object_while_its_arguments_are_on_their_way() -> None:
    in_time = 0
    for _ in range(20):
        rref: rpc.RRef[list[Any]] = rpc.remote("worker1", list)
        in_time += rref.rpc_async().append(torch.ones(1 << 21)).cancel()  # else it has all arrived by now
        del rref
    assert in_time
    gc.collect()
    assert nothing_is_left()


# ---- what the caller sees


@in_worker0()
def test_all_who_wait_are_told_at_once() -> None:
    future = rpc.rpc_async("worker1", wait_at_gate)
    seen: list[str] = []
    then = future.then(lambda done: seen.append(threading.current_thread().name))

    async def wait_for_it() -> None:
        await future

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(future.wait), pool.submit(future.result, 30.0)]
        waiting += [pool.submit(asyncio.run, wait_for_it()), pool.submit(next, rpc.as_completed([future]))]
        assert future.cancel()
        for wait in waiting[:3]:
            with pytest.raises(CancelledError):
                wait.result()
        assert waiting[3].result() is future
    then.wait()
    assert future.done()
    assert not future.cancel()
    rpc.rpc_sync("worker1", open_gate)


@in_worker0()
def test_what_has_ended_cannot_be_cancelled() -> None:
    done = rpc.rpc_async("worker1", int, args=("7",))
    assert done.wait() == 7
    assert not done.cancel()
    assert done.wait() == 7
    failed = rpc.rpc_async("worker1", int, args=("x",))
    with pytest.raises(ValueError, match="'x'"):
        failed.wait()
    assert not failed.cancel()
    assert not rpc.Future().cancel()
    made: Any = rpc.remote("worker1", dict)._get_future()
    assert not made.cancel()
    made.wait()


@in_worker0()
def test_cancelling_races_with_the_answer() -> None:
    cancelled = 0
    for number in range(1000):
        future: rpc.Future[list[int]] = rpc.rpc_async("worker1", list, args=([number],))
        if number % 3:
            rpc.rpc_sync("worker1", int)
        if future.cancel():
            cancelled += 1
            with pytest.raises(CancelledError):
                future.wait()
        else:
            assert future.wait() == [number]
    assert 0 < cancelled < 1000
    assert nothing_is_left()


def cancel_at_the_dead(worker: Worker) -> None:
    with worker.group(rpc_timeout=0):
        future = rpc.rpc_async("worker1", wait_at_gate)
        before = rpc.rpc_async("worker1", wait_at_gate)
        worker.wait_for("at the gate")
        assert before.cancel()
        worker.report("kill it")
        with pytest.raises(WorkerLostError):
            future.wait()
        assert not future.cancel()
        late = rpc.rpc_async("worker1", wait_at_gate)
        assert not late.cancel()
        with pytest.raises(WorkerLostError):
            late.wait()
        assert under_way() == 0


def test_calls_to_a_dead_worker_have_ended(run_workers: RunWorkers) -> None:
    workers = run_workers.start([cancel_at_the_dead, serve])
    for _ in range(2):
        workers[1].wait_for("at the gate")
    workers[0].tell("at the gate")
    workers[0].wait_for("kill it")
    workers[1].kill()
    workers[0].result()
