"""Ctrl-C takes effect at once, wherever the main thread waits, and the agent goes on working after it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import WorkerLostError
from rpc.options import AgentOptions
from rpc.runtime.interrupts import interruptible, protected
from tests.support.interrupting import interrupted, press
from tests.support.orders import ask, dismiss, start_followers
from tests.support.ports import reserved_port
from tests.support.serving import in_worker0, open_gate, serve, wait_at_gate
from tests.support.workers import RunWorkers, Worker

__all__ = ["reserved_port"]


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


@in_worker0()
def test_ctrl_c_interrupts_every_wait_and_calls_go_on() -> None:
    for where, wait in WAITS.items():
        interrupted(wait)
        assert works(), where
    for rank in (0, 1):
        rpc.rpc_sync(rank, open_gate)
    assert works()


@protected
def press_and_go_on(done: list[str]) -> None:
    press()
    done.append("all of it")


@in_worker0()
def test_the_next_use_restores_protection_when_the_program_has_replaced_the_handler() -> None:
    """Jupyter installs Python's own handler before each cell."""
    rref: rpc.RRef[list[int]] = rpc.remote("worker1", list)
    uses: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: rpc.rpc_sync("worker1", int),
        "rpc_async": lambda: rpc.rpc_async("worker1", int),
        "remote": lambda: rpc.remote("worker1", list),
        "to_here": rref.to_here,
        "proxy": lambda: rref.rpc_async().append(1),
    }
    for name, use in uses.items():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        use()
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            press_and_go_on(done)
            threading.Event().wait(20)
        assert done, name


def test_ctrl_c_interrupts_a_followers_barrier(run_workers: RunWorkers) -> None:
    def interrupt(worker: Worker) -> None:
        with worker.group():
            interrupted(rpc.barrier)
            assert rpc.rpc_sync("worker0", int) == 0

    run_workers([serve, interrupt])


@in_worker0()
def test_what_was_interrupted_can_be_waited_for_again() -> None:
    future = rpc.rpc_async("worker1", wait_at_gate, args=("", 3))
    following = future.then(lambda done: done.wait() + 1)
    rref = rpc.remote("worker1", wait_at_gate, args=("", 5))
    for wait in (future.wait, following.wait, rref.to_here):
        interrupted(wait)
    rpc.rpc_sync("worker1", open_gate)
    assert [future.wait(), following.wait(), rref.to_here()] == [3, 4, 5]


def send_all() -> list[rpc.Future[Any]]:
    message = torch.ones(1 << 14)
    return [rpc.rpc_async("worker1", torch.sum, args=(message,), timeout=0) for _ in range(200)]


def interrupt_sending() -> None:
    interrupted(send_all)
    assert rpc.rpc_sync("worker2", int) == 0


def send_and_wait() -> set[float]:
    return {float(future.wait()) for future in send_all()}


def test_ctrl_c_interrupts_who_waits_for_room_in_a_send_queue(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3, send_queue_bytes=1 << 20)
    assert ask(workers[0], rpc.rpc_sync, "worker1", int) == 0
    workers[1].stop()
    ask(workers[0], interrupt_sending)
    workers[1].resume()
    assert ask(workers[0], send_and_wait) == {1 << 14}
    dismiss(workers)


# ---- beginning and end


def start(worker: Worker, init_method: str, rank: int, world_size: int) -> None:
    options = AgentOptions(init_method=init_method, rendezvous_timeout=50.0)
    rpc.init_rpc(worker.name, rank=rank, world_size=world_size, rpc_backend_options=options)


def start_alone(worker: Worker) -> None:
    assert not rpc.is_initialized()
    start(worker, f"file://{worker.folder}/alone{worker.rank}", 0, 1)
    assert rpc.rpc_sync(worker.name, int) == 0
    rpc.shutdown()


@pytest.mark.parametrize(("scheme", "rank"), [("file", 0), ("tcp", 0), ("tcp", 1)], ids=str)
def test_ctrl_c_interrupts_the_rendezvous(
    run_workers: RunWorkers, reserved_port: int, scheme: str, rank: int
) -> None:
    def interrupt(worker: Worker, port: int) -> None:
        place = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else worker.init_method
        interrupted(lambda: start(worker, place, rank, 2))  # the other one never comes
        start_alone(worker)

    run_workers(interrupt, 1, args=[reserved_port])


def interrupt_shutdown(worker: Worker) -> None:
    start(worker, worker.init_method, worker.rank, worker.world_size)
    worker.wait_for("go")
    interrupted(rpc.shutdown)
    worker.report("left")
    start_alone(worker)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("farcall")]


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


# ---- at any moment


INTERRUPTS = 100


def call_in_all_ways() -> None:
    """In a function of its own, since intermediate values of an assertion live as long as its frame."""
    assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3
    assert rpc.rpc_async("worker1", torch.add, args=(1, 2)).then(lambda _: 4).wait() == 4
    assert rpc.remote("worker1", torch.ones, args=(2,)).to_here().sum() == 2
    assert rpc.rpc_sync("worker1", torch.ones, args=(100_000,)).sum() == 100_000


@interruptible
def call_until(done: threading.Event) -> None:
    while not done.is_set():
        call_in_all_ways()


class TooLong(Exception):
    pass


class NoTime(BaseException):
    pass


def raises(error: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    """A signal handler."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    return handle


@interruptible
def press_here(number: signal.Signals) -> None:
    press(number)


@protected  # for a signal may come while the one before is being counted
def outlast(number: signal.Signals, error: type[BaseException], mean_gap: float) -> None:
    """Goes on with calls while signals come, until two of them at least have ended some."""
    interrupts = 0
    done = threading.Event()

    def keep_pressing() -> None:
        pressed = 0
        while pressed < INTERRUPTS or interrupts < 2:  # on a busy machine, many may come as one
            time.sleep(random.expovariate(1 / mean_gap))
            press(number)
            pressed += 1
        done.set()

    presser = threading.Thread(target=keep_pressing)
    presser.start()
    while not done.is_set():
        try:
            call_until(done)
        except error:
            interrupts += 1
    presser.join()
    with pytest.raises(error):
        press_here(number)  # the last one may still be under way: it comes with this


@pytest.mark.parametrize("mean_gap", [0.002, 0.01])
@in_worker0()
def test_a_storm_of_ctrl_c_breaks_nothing(mean_gap: float) -> None:
    """Ctrl-C comes again and again, also while the one before is being dealt with."""
    outlast(signal.SIGINT, KeyboardInterrupt, mean_gap)
    assert works()


@pytest.mark.parametrize("error", [TooLong, NoTime, TimeoutError, RuntimeError])
@in_worker0()
def test_a_storm_of_a_handler_that_raises_breaks_nothing(error: type[BaseException]) -> None:
    """And what it raises is not taken for an error of a call, or of what was sent."""
    before = signal.signal(signal.SIGUSR1, raises(error))
    outlast(signal.SIGUSR1, error, 0.002)
    signal.signal(signal.SIGUSR1, before)
    assert works()
