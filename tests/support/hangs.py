"""Programs that hang, each in its own way, and where ``farcall why`` must say that the reason is.

Each hang runs on all workers of a group. The line that is to be named ends in the comment ``culprit:`` with
the name of the hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import dist_autograd
import dist_optim
import rpc
import spmd
from tests.support.workers import Worker

__all__ = ["HANGS", "Hang", "culprit_line"]

LONG: Final = 3600.0

LOCK = threading.Lock()
RLOCK = threading.RLock()
OTHER = threading.Lock()
CONDITION = threading.Condition()
SEMAPHORE = threading.Semaphore(0)
EVENT = threading.Event()
QUEUE = queue.Queue[None]()

ENDS_WITH_PARENT: Final = "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 9)"
"""Begin of a Python program that is killed when its parent ends."""


@dataclass(frozen=True)
class Hang:
    """A hang, and what is to be found out.

    Attributes:
        run: what each worker does.
        kind: kinds of the finding, one of which it must have.
        worker: where the culprit is.
        size: number of workers.
        dead_kinds: the same after all workers have been killed, where that is less.
        options: of the agents.
        joins: whether the workers form a group before they run.
        quick: whether it is tested by default.
    """

    run: Callable[[Worker], object]
    kind: tuple[str, ...]
    worker: str = "worker1"
    size: int = 2
    dead_kinds: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    joins: bool = True
    quick: bool = False

    @property
    def name(self) -> str:
        """Name of its function."""
        return self.run.__name__

    def __call__(self, worker: Worker) -> None:
        """Hang."""
        if not self.joins:
            self.run(worker)
            return
        with worker.group(**dict(self.options)):
            worker.report("joined")
            self.run(worker)


def culprit_line(name: str) -> int:
    """The line that is to be named."""
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# culprit: {name}"))


HANGS: dict[str, Hang] = {}


def hang(*kind: str, **how: Any) -> Callable[[Callable[[Worker], object]], Callable[[Worker], object]]:
    """A function that hangs on all workers of a group."""

    def add(run: Callable[[Worker], object]) -> Callable[[Worker], object]:
        HANGS[run.__name__] = Hang(run, kind, **how)
        return run

    return add


def from_worker0(worker: Worker, function: Callable[..., Any], *args: Any) -> None:
    """Worker 0 calls a function of worker 1, without a limit; the others leave."""
    if worker.rank == 0:
        rpc.rpc_sync("worker1", function, args=args, timeout=0)


# ---- cycles


def block() -> None:
    with LOCK:  # culprit: cycle_of_calls_and_a_lock
        pass


def call_back() -> None:
    rpc.rpc_sync("worker0", block, timeout=0)


@hang("cycle", worker="worker0")
def cycle_of_calls_and_a_lock(worker: Worker) -> None:
    if worker.rank == 0:
        with LOCK:
            rpc.rpc_sync("worker1", call_back, timeout=0)


def first_then_second() -> None:
    with LOCK:
        time.sleep(0.5)
        with OTHER:  # culprit: two_locks_in_different_order
            pass


def second_then_first() -> None:
    with OTHER:
        time.sleep(0.5)
        with LOCK:
            pass


@hang("cycle")
def two_locks_in_different_order(worker: Worker) -> None:
    if worker.rank == 0:
        calls = [rpc.rpc_async("worker1", each, timeout=0) for each in (first_then_second, second_then_first)]
        for call in calls:
            call.wait()


def lock_twice() -> None:
    with LOCK, LOCK:  # culprit: lock_taken_twice
        pass


@hang("cycle")
def lock_taken_twice(worker: Worker) -> None:
    from_worker0(worker, lock_twice)


def forward(hops: int) -> None:
    me = int(rpc.get_worker_info().name.removeprefix("worker"))
    if hops:
        rpc.rpc_sync(f"worker{(me + 1) % 3}", forward, args=(hops - 1,), timeout=0)
    else:
        with LOCK:  # culprit: cycle_through_three_workers
            pass


@hang("cycle", worker="worker0", size=3)
def cycle_through_three_workers(worker: Worker) -> None:
    if worker.rank == 0:
        with LOCK:
            rpc.rpc_sync("worker1", forward, args=(2,), timeout=0)


# ---- a callee that waits


def enter_lock() -> None:
    with LOCK:
        pass


def hold_in_sleep() -> None:
    held = threading.Event()

    def keep() -> None:
        with LOCK:
            held.set()
            time.sleep(LONG)  # culprit: lock_held_by_another_thread

    threading.Thread(target=keep, daemon=True, name="keeper").start()
    held.wait()
    enter_lock()


@hang("sleeps")
def lock_held_by_another_thread(worker: Worker) -> None:
    from_worker0(worker, hold_in_sleep)


def hold_rlock_in_sleep() -> None:
    held = threading.Event()

    def keep() -> None:
        RLOCK.acquire()
        held.set()
        time.sleep(LONG)  # culprit: rlock_held_by_another_thread

    threading.Thread(target=keep, daemon=True, name="keeper").start()
    held.wait()
    with RLOCK:
        pass


@hang("sleeps")
def rlock_held_by_another_thread(worker: Worker) -> None:
    from_worker0(worker, hold_rlock_in_sleep)


def forget_release() -> None:
    LOCK.acquire()


def acquire_forgotten() -> None:
    forget_release()
    LOCK.acquire()  # culprit: lock_never_released


@hang("lock")
def lock_never_released(worker: Worker) -> None:
    from_worker0(worker, acquire_forgotten)


def take() -> None:
    QUEUE.get()  # culprit: queue_stays_empty


@hang("queue")
def queue_stays_empty(worker: Worker) -> None:
    from_worker0(worker, take)


def await_event() -> None:
    EVENT.wait()  # culprit: event_is_never_set


@hang("event")
def event_is_never_set(worker: Worker) -> None:
    from_worker0(worker, await_event)


def await_condition() -> None:
    with CONDITION:
        CONDITION.wait()  # culprit: condition_is_never_notified


@hang("condition")
def condition_is_never_notified(worker: Worker) -> None:
    from_worker0(worker, await_condition)


def await_semaphore() -> None:
    SEMAPHORE.acquire()  # culprit: semaphore_is_never_released


@hang("semaphore")
def semaphore_is_never_released(worker: Worker) -> None:
    from_worker0(worker, await_semaphore)


def await_party() -> None:
    threading.Barrier(2).wait()  # culprit: barrier_of_threads_lacks_one


@hang("thread barrier")
def barrier_of_threads_lacks_one(worker: Worker) -> None:
    from_worker0(worker, await_party)


def join_thread() -> None:
    thread = threading.Thread(target=EVENT.wait, daemon=True)
    thread.start()
    thread.join()  # culprit: thread_never_ends


@hang("join")
def thread_never_ends(worker: Worker) -> None:
    from_worker0(worker, join_thread)


def receive() -> None:
    one, _other = socket.socketpair()
    one.recv(1)  # culprit: socket_brings_nothing


@hang("socket")
def socket_brings_nothing(worker: Worker) -> None:
    from_worker0(worker, receive)


def receive_in_pipe() -> None:
    one, _other = multiprocessing.Pipe()
    one.recv()  # culprit: pipe_brings_nothing


@hang("pipe")
def pipe_brings_nothing(worker: Worker) -> None:
    from_worker0(worker, receive_in_pipe)


def open_fifo(path: str) -> None:
    os.mkfifo(path)
    with open(path) as file:  # culprit: file_cannot_be_opened
        file.read()


@hang("file")
def file_cannot_be_opened(worker: Worker) -> None:
    from_worker0(worker, open_fifo, str(worker.folder / "fifo"))


def await_subprocess() -> None:
    with subprocess.Popen([sys.executable, "-c", f"{ENDS_WITH_PARENT}; time.sleep(3600)"]) as process:
        process.wait()  # culprit: subprocess_does_not_end


@hang("subprocess")
def subprocess_does_not_end(worker: Worker) -> None:
    from_worker0(worker, await_subprocess)


def sleep() -> None:
    time.sleep(LONG)  # culprit: callee_sleeps


@hang("sleeps")
def callee_sleeps(worker: Worker) -> None:
    from_worker0(worker, sleep)


def compute() -> None:
    while True:
        sum(range(1000))  # culprit: callee_computes


@hang("computes")
def callee_computes(worker: Worker) -> None:
    from_worker0(worker, compute)


def multiply() -> None:
    matrix = torch.ones(600, 600)
    while True:
        matrix @ matrix  # culprit: callee_computes_in_pytorch


@hang("computes")
def callee_computes_in_pytorch(worker: Worker) -> None:
    from_worker0(worker, multiply)


# ---- the interpreter


def hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))  # culprit: interpreter_held_by_a_sleep_in_c


@hang("frozen")
def interpreter_held_by_a_sleep_in_c(worker: Worker) -> None:
    from_worker0(worker, hold_interpreter)


def sum_for_ever() -> None:
    sum(range(1 << 62))  # culprit: interpreter_held_by_a_loop_in_c


@hang("frozen")
def interpreter_held_by_a_loop_in_c(worker: Worker) -> None:
    from_worker0(worker, sum_for_ever)


def match_for_ever() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # culprit: interpreter_held_by_a_regular_expression


@hang("frozen")
def interpreter_held_by_a_regular_expression(worker: Worker) -> None:
    from_worker0(worker, match_for_ever)


@hang("frozen")
def interpreter_held_in_the_main_thread(worker: Worker) -> None:
    if worker.rank == 1:
        ctypes.PyDLL(None).sleep(int(LONG))  # culprit: interpreter_held_in_the_main_thread
    rpc.barrier()


# ---- the process


def stop_myself() -> None:
    time.sleep(1.2)  # so that a look has seen it
    os.kill(os.getpid(), signal.SIGSTOP)


@hang("stopped", dead_kinds=("dead",))
def process_is_stopped(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: process_is_stopped
    rpc.rpc_sync("worker1", stop_myself, timeout=0)


def be_traced() -> None:
    """Start a debugger, which stops this process."""
    time.sleep(1.5)  # so that a look has seen it
    program = (
        f"{ENDS_WITH_PARENT}\n"
        f"for thread in os.listdir('/proc/{os.getpid()}/task'):\n"
        "    ctypes.CDLL(None).ptrace(16, int(thread), 0, 0)\n"
        "time.sleep(3600)\n"
    )
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
    subprocess.Popen([sys.executable, "-c", program])


@hang("traced", dead_kinds=("dead",))
def process_is_held_by_a_debugger(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: process_is_held_by_a_debugger
    rpc.rpc_sync("worker1", be_traced)
    rpc.rpc_sync("worker1", sleep, timeout=0)


@hang("dead", size=3, dead_kinds=("dead",))
def worker_is_dead(worker: Worker) -> None:
    if worker.rank == 1:
        EVENT.wait(2.5)  # culprit: worker_is_dead
        worker.die()
    if worker.rank == 2:
        QUEUE.get()
    rpc.rpc_sync("worker2", await_event, timeout=0)


# ---- queues and threads


def many(worker: Worker, function: Callable[[], object], count: int) -> None:
    calls = [rpc.rpc_async("worker1", function, timeout=0) for _ in range(count)]
    worker.report("called")
    for call in calls:
        call.wait()


def occupy() -> None:
    EVENT.wait()  # culprit: all_threads_are_busy


@hang("event", "busy", options=(("num_worker_threads", 2),))
def all_threads_are_busy(worker: Worker) -> None:
    if worker.rank == 0:
        many(worker, occupy, 800)


def freeze() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))  # culprit: send_queue_is_full


@hang("frozen", options=(("send_queue_bytes", 1 << 20), ("shared_memory_bytes", 0)))
def send_queue_is_full(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.rpc_async("worker1", freeze, timeout=0)
        time.sleep(1.0)
        data = torch.ones(1 << 17)
        for _ in range(64):
            rpc.rpc_async("worker1", torch.numel, args=(data,), timeout=0)


# ---- operations of a group


@hang("sleeps")
def barrier_lacks_a_worker(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: barrier_lacks_a_worker
    rpc.barrier()


@hang("sleeps", size=3, worker="worker0")
def barrier_lacks_its_leader(worker: Worker) -> None:
    if worker.rank == 0:
        time.sleep(LONG)  # culprit: barrier_lacks_its_leader
    rpc.barrier()


@hang("event")
def shutdown_lacks_a_worker(worker: Worker) -> None:
    if worker.rank == 1:
        EVENT.wait()  # culprit: shutdown_lacks_a_worker


@hang("queue")
def shutdown_waits_for_a_callee(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.rpc_async("worker1", take_in_shutdown, timeout=0)


def take_in_shutdown() -> None:
    QUEUE.get()  # culprit: shutdown_waits_for_a_callee


@hang("sleeps", size=3, quick=True)
def collective_lacks_a_rank(worker: Worker) -> None:
    dist.init_process_group(
        "farcall", init_method=f"{worker.init_method}-c10d", rank=worker.rank, world_size=worker.world_size
    )
    dist.all_reduce(torch.ones(4))
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: collective_lacks_a_rank
    dist.all_reduce(torch.ones(4))


@hang("event", size=3)
def broadcast_lacks_its_root(worker: Worker) -> None:
    dist.init_process_group(
        "farcall", init_method=f"{worker.init_method}-c10d", rank=worker.rank, world_size=worker.world_size
    )
    if worker.rank == 1:
        EVENT.wait()  # culprit: broadcast_lacks_its_root
    dist.broadcast(torch.ones(4), src=1)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(LONG)  # culprit: backward_sleeps_elsewhere
        return gradient * 2


def slow(given: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Slow.apply(given)  # type: ignore[no-untyped-call]
    return result


@hang("sleeps")
def backward_sleeps_elsewhere(worker: Worker) -> None:
    if worker.rank == 0:
        with dist_autograd.context() as context:
            given = torch.ones(3, requires_grad=True)
            loss = rpc.rpc_sync("worker1", slow, args=(given,)).sum()
            dist_autograd.backward(context, [loss])


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        EVENT.wait()  # culprit: step_waits_elsewhere


def make_parameter() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def product(parameter: Any, given: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = parameter.local_value() * given
    return result


@hang("event")
def step_waits_elsewhere(worker: Worker) -> None:
    if worker.rank == 0:
        parameter = rpc.remote("worker1", make_parameter)
        optimizer = dist_optim.DistributedOptimizer(SlowSGD, [parameter], lr=0.1)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("worker1", product, args=(parameter, torch.ones(3))).sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)


@hang("rendezvous", worker="worker1", joins=False)
def rendezvous_lacks_a_rank(worker: Worker) -> None:
    if worker.rank == 0:
        time.sleep(LONG)
    options = rpc.TensorPipeRpcBackendOptions(init_method=worker.init_method)
    rpc.init_rpc("worker1", None, 1, 2, options)  # culprit: rendezvous_lacks_a_rank


# ---- coroutines, futures and references


async def await_nothing() -> None:
    await asyncio.Event().wait()  # culprit: coroutine_awaits_an_event


@hang("awaits")
def coroutine_awaits_an_event(worker: Worker) -> None:
    from_worker0(worker, await_nothing)


def sleep_for_a_coroutine() -> None:
    time.sleep(LONG)  # culprit: coroutine_awaits_a_call


async def await_call() -> None:
    await rpc.rpc_async("worker2", sleep_for_a_coroutine, timeout=0)


@hang("sleeps", worker="worker2", size=3)
def coroutine_awaits_a_call(worker: Worker) -> None:
    from_worker0(worker, await_call)


async def block_the_loop() -> None:
    time.sleep(LONG)  # noqa: ASYNC251 # culprit: coroutine_blocks_its_loop


@hang("sleeps")
def coroutine_blocks_its_loop(worker: Worker) -> None:
    from_worker0(worker, block_the_loop)


@rpc.functions.async_execution
def never_done() -> torch.futures.Future[None]:
    return torch.futures.Future()


@hang("postponed", worker="worker0")
def future_is_never_completed(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.rpc_sync("worker1", never_done, timeout=0)  # culprit: future_is_never_completed


def make_slowly() -> int:
    time.sleep(LONG)  # culprit: object_is_never_made
    return 1


@hang("sleeps")
def object_is_never_made(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.remote("worker1", make_slowly, timeout=0).to_here(timeout=0)


class Counter:
    def count(self) -> None:
        QUEUE.get()  # culprit: method_of_a_remote_object_waits


@hang("queue")
def method_of_a_remote_object_waits(worker: Worker) -> None:
    if worker.rank == 0:
        counter = rpc.remote("worker1", Counter)
        counter.rpc_sync(timeout=0).count()


def sleep_at_the_end() -> None:
    time.sleep(LONG)  # culprit: chain_of_calls


def pass_on() -> None:
    rpc.rpc_sync("worker2", pass_on_again, timeout=0)


def pass_on_again() -> None:
    rpc.rpc_sync("worker3", sleep_at_the_end, timeout=0)


@hang("sleeps", worker="worker3", size=4)
def chain_of_calls(worker: Worker) -> None:
    from_worker0(worker, pass_on)


# ---- SPMD programs


@hang("stopped", worker="worker1", size=3, dead_kinds=("dead",))
def driver_waits_for_a_stopped_worker(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: driver_waits_for_a_stopped_worker
    if worker.rank == 0:
        spmd.use_spmd()
        values = torch.ones(8).to(spmd.device())
        spmd.sync()
        rpc.rpc_async("worker1", stop_myself, timeout=0)
        time.sleep(2.0)
        print((values * 2).sum().item())


def multiply_long() -> None:
    while True:
        torch.ones(600, 600) @ torch.ones(600, 600)  # culprit: rank_of_a_collective_computes


@hang("computes", size=2)
def rank_of_a_collective_computes(worker: Worker) -> None:
    dist.init_process_group(
        "farcall", init_method=f"{worker.init_method}-c10d", rank=worker.rank, world_size=worker.world_size
    )
    if worker.rank == 1:
        multiply_long()
    dist.all_reduce(torch.ones(4))
