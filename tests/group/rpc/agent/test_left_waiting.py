"""Nobody is left waiting: not by a lock that a fork or a finalizer came across, not by a worker that left."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.agent.agent import UNSET_TIMEOUT, Agent
from rpc.agent.futures import Future
from rpc.errors import NotInitializedError, RpcError, WorkerLostError
from rpc.runtime.current import clear_current_agent, current_agent
from rref.value import Value
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, current_worker

made = threading.Event()


def let_be_made() -> None:
    made.set()


def wait_to_be_made() -> None:
    made.wait()


class Slow:
    """Its making ends when somebody says so."""

    def __init__(self) -> None:
        made.wait()
        self._set = threading.Event()

    def wait(self) -> str:
        self._set.wait()
        return "waited"

    def set(self) -> str:
        self._set.set()
        return "set"


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def call_two_methods_before_the_object_is_made(worker: Worker) -> tuple[str, str] | None:
    with worker.group():
        if worker.rank:
            return None
        rref = rpc.remote("worker1", Slow)
        waiting, setting = rref.rpc_async().wait(), rref.rpc_async().set()
        rpc.rpc_sync("worker1", let_be_made)
        return waiting.wait(), setting.wait()


def test_methods_called_before_the_object_is_made_run_side_by_side(run_workers: RunWorkers) -> None:
    assert run_workers(call_two_methods_before_the_object_is_made, 2)[0] == ("waited", "set")


class Told:
    """Tells, when it is destroyed, on which thread."""

    def __call__(self) -> None: ...

    def __reduce__(self) -> Any:
        return int, ()

    def __del__(self) -> None:
        current_worker().report("destroyed on", threading.current_thread().name)


def leave_the_function_to_the_agent(worker: Worker) -> None:
    with worker.group():
        if worker.rank == 0:
            rpc.remote("worker1", Told())


def test_the_function_of_a_forgotten_creation_is_not_destroyed_on_the_loop(run_workers: RunWorkers) -> None:
    workers = run_workers.start(leave_the_function_to_the_agent, 2)
    assert workers[0].wait_for("destroyed on") != "farcall-loop"
    workers.results()


def is_in(thread: threading.Thread, function: Callable[..., object]) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def leave_at_once(worker: Worker) -> list[Any]:
    worker.join()
    if worker.rank:
        worker.wait_for("end")
        rpc.shutdown(graceful=False)
        return []
    waiting = [
        in_thread(lambda: rpc.remote("worker0", Slow).local_value()),
        in_thread(rpc.barrier),
        in_thread(lambda: rpc.rpc_sync("worker1", time.sleep, (100,))),
        in_thread(rpc.shutdown),
    ]
    agent: Agent = current_agent()
    until(lambda: agent.lifecycle.departure._waiting is not None and agent.calls.table)
    until(lambda: is_in(waiting[0][0], Value.wait))
    with pytest.raises(RpcError, match="by another thread already"):
        rpc.shutdown()
    rpc.shutdown(graceful=False)
    worker.report("left")
    for thread, _ in waiting:
        thread.join()
    return [outcome for _, [outcome] in waiting]


def test_whoever_waits_is_told_when_another_thread_leaves(run_workers: RunWorkers) -> None:
    workers = run_workers.start(leave_at_once, 2)
    workers[0].wait_for("left")
    workers[1].tell("end")
    local, barrier, call, shutdown = workers.results()[0]
    assert (local, call) == (NotInitializedError, NotInitializedError)
    assert issubclass(barrier, RpcError)
    assert issubclass(shutdown, RpcError)


def come_back_while_another_thread_is_still_leaving(worker: Worker) -> int:
    worker.join()
    agent: Agent = current_agent()
    about_to_clear, go_on = threading.Event(), threading.Event()

    def clear_late(which: Agent) -> None:
        if threading.current_thread() is slow:
            about_to_clear.set()
            go_on.wait()
        clear_current_agent(which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["rpc.agent.agent"], "clear_current_agent", clear_late)
        rpc.rpc_async(worker.name, wait_to_be_made)
        slow, _ = in_thread(rpc.shutdown)
        until(lambda: agent.lifecycle.departure._waiting is not None)
        rpc.shutdown(graceful=False)
        about_to_clear.wait()
        made.set()
        with worker.group():
            go_on.set()
            slow.join()
            return int(rpc.rpc_sync(worker.name, abs, (-1,)))


def test_a_thread_that_is_late_to_leave_leaves_the_next_agent_alone(run_workers: RunWorkers) -> None:
    assert run_workers(come_back_while_another_thread_is_still_leaving, 1) == [1]


def make_a_future_as_another_thread_leaves(worker: Worker) -> None:
    worker.join()
    agent: Agent = current_agent()
    call = agent.calls.caller.call(worker.name, wait_to_be_made, (), {}, UNSET_TIMEOUT)
    rpc.shutdown(graceful=False)
    future = Future.for_call(call)
    with pytest.raises(NotInitializedError, match="RPC has been shut down"):
        torch.futures.wait_all([future])
    made.set()


def test_a_future_that_is_made_as_another_thread_leaves_is_completed(run_workers: RunWorkers) -> None:
    run_workers.start(make_a_future_as_another_thread_leaves, 1).results()


def leave_while_a_call_waits_for_a_dead_worker(worker: Worker) -> Any:
    worker.join(dynamic=True)
    if worker.rank:
        worker.report("here")
        time.sleep(100)
    worker.wait_for("all here")
    thread, outcome = in_thread(lambda: rpc.rpc_sync("worker1", time.sleep, (100,), timeout=0))
    agent: Agent = current_agent()
    while not agent.calls.table:
        time.sleep(0.01)
    leaving, _ = in_thread(rpc.shutdown)
    assert agent.lifecycle.departure is not None
    while agent.lifecycle.departure._waiting is None:
        time.sleep(0.01)
    worker.report("waits")
    leaving.join()
    thread.join()
    return outcome


def test_a_dynamic_worker_can_leave_when_the_worker_that_it_waits_for_dies(run_workers: RunWorkers) -> None:
    workers = run_workers.start(leave_while_a_call_waits_for_a_dead_worker, 2)
    workers[1].wait_for("here")
    workers[0].tell("all here")
    workers[0].wait_for("waits")
    workers[1].kill()
    assert workers[0].result() == [WorkerLostError]


def fail_to_listen(worker: Worker) -> tuple[str, list[str]]:
    with pytest.raises(OSError, match="cannot listen") as caught:
        worker.join(listen="203.0.113.7")
    return str(caught.value), [thread.name for thread in threading.enumerate()]


def test_an_agent_that_cannot_listen_says_where_and_leaves_no_thread(run_workers: RunWorkers) -> None:
    [(text, threads)] = run_workers(fail_to_listen, 1)
    assert "cannot listen on '203.0.113.7'" in text
    assert not [name for name in threads if name.startswith("farcall")]


def come_and_go(worker: Worker) -> int:
    for _ in range(3):
        worker.join()
        rpc.rpc_sync(worker.name, abs, (-1,))
        rpc.shutdown()
    gc.collect()
    return sum(type(each) is Agent for each in gc.get_objects())


def test_nothing_keeps_an_agent_that_was_shut_down(run_workers: RunWorkers) -> None:
    assert run_workers(come_and_go, 1) == [0]
