"""Threads that read connections themselves, between real workers: nothing waits for a thread that is busy."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import dist_autograd
import rpc
from dist_autograd.backwards import WHOLE_PART
from rpc.agent.dispatcher import Dispatcher
from rpc.errors import RpcTimeoutError
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.runtime.executor import Task
from rpc.wire.frames import Frame
from rref.requests import INVOKE
from tests.support.serving import first_of, open_gate, wait_at_gate
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker


def back_and_forth(depth: int) -> int:
    """Calls the other worker, which calls this one, and so on."""
    here = rpc.get_worker_info().id
    return depth if not depth else rpc.rpc_sync(1 - here, back_and_forth, args=(depth - 1,)) + 1


def warm_up(to: str = "worker1", calls: int = 20) -> None:
    for index in range(calls):
        assert rpc.rpc_sync(to, abs, args=(-index,)) == index


def test_calls_nest_both_ways_between_threads_that_read(run_workers: RunWorkers) -> None:
    def nest(_: Worker) -> list[int]:
        warm_up()
        return [rpc.rpc_sync("worker1", back_and_forth, args=(depth,)) for depth in (0, 1, 2, 7, 40) * 3]

    assert first_of(run_workers, nest) == [0, 1, 2, 7, 40] * 3


def test_a_callee_that_blocks_does_not_hold_up_the_next_call(run_workers: RunWorkers) -> None:
    def call_behind(_: Worker) -> int:
        warm_up()
        waiting = rpc.rpc_async("worker1", wait_at_gate, args=("", 3))
        for _round in range(20):
            warm_up(calls=2)
        rpc.rpc_sync("worker1", open_gate)
        return int(waiting.wait())

    assert first_of(run_workers, call_behind) == 3


def test_many_threads_share_a_connection(run_workers: RunWorkers) -> None:
    def call_from_many(_: Worker) -> list[int]:
        sums = [0] * 8

        def call(index: int) -> None:
            for number in range(100):
                sums[index] += rpc.rpc_sync("worker1", abs, args=(-number,))

        threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sums

    assert first_of(run_workers, call_from_many) == [4950] * 8


def test_a_timeout_ends_the_wait_of_a_thread_that_reads_and_calls_go_on(run_workers: RunWorkers) -> None:
    def time_out(_: Worker) -> bool:
        warm_up()
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", wait_at_gate, timeout=0.05)
        rpc.rpc_sync("worker1", open_gate)
        warm_up()
        return True

    assert first_of(run_workers, time_out)


def ask_back_and_wait() -> int:
    return sum(rpc.rpc_sync("worker0", abs, args=(-number,)) for number in range(10))


def test_calls_of_others_are_answered_while_a_thread_waits_for_a_reply(run_workers: RunWorkers) -> None:
    def wait_for_long(_: Worker) -> int:
        warm_up()
        return int(rpc.rpc_sync("worker1", ask_back_and_wait))

    assert first_of(run_workers, wait_for_long) == 45


class EndsAtGate:
    """Arrives as a number; where it was made, its destructor waits at the gate."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (3,)

    def __del__(self) -> None:
        wait_at_gate()


def test_a_destructor_of_what_was_returned_does_not_hold_up_the_next_call(run_workers: RunWorkers) -> None:
    def call_behind(_: Worker) -> int:
        warm_up()
        value = rpc.rpc_sync("worker1", EndsAtGate)
        rpc.rpc_sync("worker1", open_gate, timeout=10)
        return int(value)

    assert first_of(run_workers, call_behind) == 3


def wait_for_one_reply(count: int) -> list[str]:
    """What some threads get of one call, which is answered when all of them wait, and not through a call."""
    values: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder, "gate")
        os.mkfifo(gate)
        future = rpc.rpc_async("worker1", Path.read_text, args=(gate,))
        call = future._call
        assert call is not None
        waiters = call._waiters
        threads = [threading.Thread(target=lambda: values.append(future.wait())) for _ in range(count)]
        for thread in threads:
            thread.start()
        until(lambda: len(waiters) == count)
        gate.write_text("open")
        for thread in threads:
            thread.join()
    return values


def test_all_threads_that_wait_for_one_reply_are_woken_whoever_reads_it(run_workers: RunWorkers) -> None:
    def wait_together(_: Worker) -> list[list[str]]:
        warm_up()
        return [wait_for_one_reply(3) for _round in range(20)]

    assert first_of(run_workers, wait_together) == [["open"] * 3] * 20


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def count_what_threads_take() -> None:
    """Has the owner note the kinds of messages that threads which stand by take in."""
    dispatcher: Dispatcher = current_agent().dispatcher
    take = dispatcher.taken_by_thread

    def noting(peer: Peer, frame: Frame) -> Task | None:
        if len(frame.buffers) > 1:
            TAKEN.append(frame.kind)
        return take(peer, frame)

    dispatcher.taken_by_thread = noting  # type: ignore[method-assign]


TAKEN: list[int] = []


def taken() -> set[int]:
    return set(TAKEN)


def test_who_stands_by_takes_large_requests_of_a_training_step(run_workers: RunWorkers) -> None:
    """In shared memory, with headers: a method of a remote object in a context, a part of the backward."""

    def task(_: Worker) -> None:
        rpc.rpc_sync("worker1", count_what_threads_take)
        scaled = rpc.remote("worker1", Scaled)
        x = torch.ones(1 << 18, requires_grad=True)

        def step() -> bool:
            with dist_autograd.context() as context_id:
                y = scaled.rpc_sync().forward(x)
                dist_autograd.backward(context_id, [y.square().sum()])
                assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full_like(x, 8))
            kinds: set[int] = rpc.rpc_sync("worker1", taken)
            return {INVOKE, WHOLE_PART} <= kinds

        until(step)

    first_of(run_workers, task)
