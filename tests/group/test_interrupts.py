"""Ctrl-C takes effect at once, wherever the main thread waits, and the agent goes on working after it."""

from __future__ import annotations

import functools
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rpc
from rpc.agent.agent import Agent
from rpc.agent.caller import Caller
from rpc.agent.departure import Departure
from rpc.errors import NotInitializedError, WorkerLostError
from rpc.group import connections
from rpc.options import AgentOptions
from rpc.runtime.current import current_agent
from tests.support.ctrl_c import CtrlC
from tests.support.interrupting import interrupted
from tests.support.serving import first_of, open_gate, serve, wait_at_gate
from tests.support.shared_memory import all_returned
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker


def works() -> bool:
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum()
    back = rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker0", torch.add, (2, 3)))
    return (float(total), back) == (4.0, 5)


class Holder:
    def hold(self) -> None:
        wait_at_gate()


def wait_for_all() -> None:
    with rpc.wait_all():
        rpc.rpc_async("worker1", wait_at_gate)


WAITS: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("worker1", wait_at_gate),
    "rpc_sync without timeout": lambda: rpc.rpc_sync("worker1", wait_at_gate, timeout=0),
    "rpc_sync to oneself": lambda: rpc.rpc_sync("worker0", wait_at_gate),
    "wait": lambda: rpc.rpc_async("worker1", wait_at_gate).wait(),
    "wait for then": lambda: rpc.rpc_async("worker1", wait_at_gate).then(lambda _: None).wait(),
    "wait for a future of one's own": lambda: rpc.Future[None]().wait(),
    "wait_all": wait_for_all,
    "to_here": lambda: rpc.remote("worker1", wait_at_gate).to_here(),
    "to_here on the owner": lambda: rpc.remote("worker0", wait_at_gate).to_here(),
    "local_value": lambda: rpc.remote("worker0", wait_at_gate).local_value(),
    "proxy": lambda: rpc.remote("worker1", Holder).rpc_sync().hold(),
    "the leader's barrier": lambda: rpc.barrier(["worker0", "worker1"]),
}


@pytest.mark.parametrize("where", WAITS)
def test_ctrl_c_interrupts(run_workers: RunWorkers, where: str) -> None:
    def interrupt(_: Worker) -> bool:
        interrupted(WAITS[where])
        still_works = works()
        for rank in (0, 1):
            rpc.rpc_sync(rank, open_gate)
        return still_works and works()

    assert first_of(run_workers, interrupt)


def test_ctrl_c_interrupts_a_followers_barrier(run_workers: RunWorkers) -> None:
    def interrupt(worker: Worker) -> None:
        with worker.group():
            interrupted(rpc.barrier)
            assert rpc.rpc_sync("worker0", int) == 0

    run_workers([serve, interrupt])


def test_what_was_interrupted_can_be_waited_for_again(run_workers: RunWorkers) -> None:
    def interrupt(_: Worker) -> list[int]:
        future = rpc.rpc_async("worker1", wait_at_gate, args=("", 3))
        following = future.then(lambda done: done.wait() + 1)
        rref = rpc.remote("worker1", wait_at_gate, args=("", 5))
        for wait in (future.wait, following.wait, rref.to_here):
            interrupted(wait)
        rpc.rpc_sync("worker1", open_gate)
        return [future.wait(), following.wait(), rref.to_here()]

    assert first_of(run_workers, interrupt) == [3, 4, 5]


# ---- beginning and end


def start_alone(worker: Worker, init_method: str, rank: int, world_size: int, **given: Any) -> None:
    options = AgentOptions(init_method=init_method, rendezvous_timeout=25.0, **given)
    rpc.init_rpc(worker.name, rank=rank, world_size=world_size, rpc_backend_options=options)


@pytest.mark.parametrize(("scheme", "rank"), [("file", 0), ("file", 1), ("tcp", 0), ("tcp", 1)], ids=str)
def test_ctrl_c_interrupts_the_rendezvous(run_workers: RunWorkers, scheme: str, rank: int) -> None:
    def interrupt(worker: Worker, port: int) -> None:
        place = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else worker.init_method
        interrupted(lambda: start_alone(worker, place, rank, 2))  # the other one never comes
        assert not rpc.is_initialized()
        start_alone(worker, f"file://{worker.folder}/alone", 0, 1)
        assert rpc.rpc_sync(worker.name, int) == 0
        rpc.shutdown()

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    run_workers(interrupt, 1, args=[port])


def interrupt_shutdown(worker: Worker) -> None:
    start_alone(worker, worker.init_method, worker.rank, worker.world_size)
    worker.wait_for("go")
    interrupted(rpc.shutdown)
    assert not rpc.is_initialized()
    worker.report("left")
    start_alone(worker, f"file://{worker.folder}/alone", 0, 1)
    assert rpc.rpc_sync(worker.name, int) == 0
    rpc.shutdown()


def outlast_the_other(worker: Worker) -> None:
    with worker.group():
        assert rpc.rpc_sync("worker0", int) == 0
        worker.report("called")
        worker.wait_for("go")
        with pytest.raises(WorkerLostError, match="'worker0'"):
            rpc.rpc_sync("worker0", int)


def test_ctrl_c_in_shutdown_leaves_at_once(run_workers: RunWorkers) -> None:
    workers = run_workers.start([interrupt_shutdown, outlast_the_other])
    workers[1].wait_for("called")
    workers[0].tell("go")
    workers[0].wait_for("left")
    workers[1].tell("go")
    workers.results()


def interrupt_a_claim(worker: Worker) -> None:
    def claim_and_interrupt(departure: Departure) -> bool:
        assert claim(departure)
        raise KeyboardInterrupt

    claim = Departure.claim
    start_alone(worker, worker.init_method, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Departure, "claim", claim_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            rpc.shutdown()
    assert not rpc.is_initialized()
    start_alone(worker, f"file://{worker.folder}/alone", 0, 1)
    rpc.shutdown()


def test_ctrl_c_right_after_a_shutdown_has_begun_leaves_at_once(run_workers: RunWorkers) -> None:
    run_workers(interrupt_a_claim, 1)


def threads_of_the_agent() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("farcall")]


class Closing:
    """What an agent has to undo when it closes, and a thread that waits for it."""

    def __init__(self) -> None:
        self.agent: Agent = current_agent()
        self.outcome: list[type[Exception]] = []
        self._caller = threading.Thread(target=self._call)
        self._caller.start()
        under_way.wait()

    def _call(self) -> None:
        try:
            rpc.rpc_sync("worker0", wait_to_be_let_go, timeout=0)
        except Exception as error:
            self.outcome.append(type(error))

    def check_done(self, interval: float) -> None:
        let_go.set()
        self._caller.join()
        assert self.outcome == [NotInitializedError]
        assert not rpc.is_initialized()
        assert sys.getswitchinterval() == interval
        until(lambda: not threads_of_the_agent())


under_way, let_go = threading.Event(), threading.Event()


def wait_to_be_let_go() -> None:
    under_way.set()
    let_go.wait()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["on_close", "on_closed"])
def test_ctrl_c_in_what_is_done_at_the_end_leaves_the_rest_of_it_done(
    run_workers: RunWorkers, where: str
) -> None:
    def interrupt(worker: Worker) -> None:
        interval = sys.getswitchinterval()
        start_alone(worker, worker.init_method, 0, 1)
        closing = Closing()
        getattr(closing.agent, where)(raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            rpc.shutdown(graceful=False)
        closing.check_done(interval)

    run_workers(interrupt, 1)


def interrupt_the_farewell(worker: Worker) -> None:
    interval = sys.getswitchinterval()
    start_alone(worker, worker.init_method, worker.rank, worker.world_size, shared_memory_bytes=0)
    rpc.rpc_sync("worker1", int)
    worker.report("called")
    worker.wait_for("go")
    closing = Closing()
    rpc.rpc_async("worker1", len, args=(bytes(4 << 20),))  # more than a socket takes
    key = CtrlC()
    signal.signal(signal.SIGINT, key.handle)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as fingers:
        patch.setattr(connections, "FAREWELL_SECONDS", 1000.0)
        pressing = fingers.submit(key.press_when, lambda: closing.agent.connections._closed)
        with pytest.raises(KeyboardInterrupt):
            rpc.shutdown(graceful=False)
        pressing.result()
    closing.check_done(interval)
    worker.report("left")


def test_ctrl_c_ends_the_farewell_to_a_worker_that_is_stopped(run_workers: RunWorkers) -> None:
    workers = run_workers.start([interrupt_the_farewell, functools.partial(serve, shared_memory_bytes=0)])
    workers[0].wait_for("called")
    workers[1].stop()
    workers[0].tell("go")
    workers[0].wait_for("left")
    workers[1].signal(signal.SIGCONT)
    workers.results()


# ---- the fixture's own signal, as a shell sends it


def wait_for_signal(worker: Worker) -> bool:
    with worker.group():
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync("worker1", wait_at_gate)
        rpc.rpc_sync("worker1", open_gate)
        return works()


def test_a_signal_from_another_process_interrupts(run_workers: RunWorkers) -> None:
    workers = run_workers.start([wait_for_signal, serve])
    workers[1].wait_for("at the gate")
    workers[0].interrupt()
    assert workers.results()[0]


# ---- at any moment


CALLS: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("worker1", int),
    "rpc_async": lambda: rpc.rpc_async("worker1", int),
    "remote": lambda: rpc.remote("worker1", int),
}


def test_ctrl_c_right_before_a_call_is_sent_leaves_nothing_under_way(run_workers: RunWorkers) -> None:
    def interrupt(_: Worker) -> bool:
        def transmit(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        for call in CALLS.values():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Caller, "transmit", transmit)
                with pytest.raises(KeyboardInterrupt):
                    call()
        agent = current_agent()
        assert isinstance(agent, Agent)
        return works() and not agent.calls.unanswered()

    assert first_of(run_workers, interrupt)


INTERRUPTS = 100


def call_in_all_ways() -> None:
    """In a function of its own, since intermediate values of an assertion live as long as its frame."""
    assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3
    assert rpc.rpc_async("worker1", torch.add, args=(1, 2)).then(lambda _: 4).wait() == 4
    assert rpc.remote("worker1", torch.ones, args=(2,)).to_here().sum() == 2
    assert rpc.rpc_sync("worker1", torch.ones, args=(100_000,)).sum() == 100_000


def interrupt_anywhere(_: Worker) -> bool:
    key = CtrlC()
    signal.signal(signal.SIGINT, key.handle)
    may_press, pressed = threading.Semaphore(0), threading.Event()

    def press() -> None:
        for _round in range(INTERRUPTS):
            may_press.acquire()
            time.sleep(random.uniform(0, 0.003))  # somewhere in what is done below
            key.press()
            pressed.set()

    thread = threading.Thread(target=press)
    thread.start()
    for _round in range(INTERRUPTS):
        try:
            may_press.release()
            while not pressed.is_set():
                call_in_all_ways()
        except KeyboardInterrupt:
            pass
        pressed.wait()
        pressed.clear()
    thread.join()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A finalizer that was interrupted is made good when there are not enough segments.
    kept = [rpc.rpc_sync("worker1", torch.ones, args=(100_000,)) for _ in range(20)]
    del kept
    until(lambda: rpc.rpc_sync("worker1", all_returned))
    return works()


def test_ctrl_c_at_any_moment_breaks_nothing(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, interrupt_anywhere)
