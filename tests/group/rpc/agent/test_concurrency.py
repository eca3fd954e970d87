"""``remote(..., concurrency=1)``: the methods of an object one at a time, in each caller's order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import rpc
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from tests.support.orders import ask, dismiss, start_followers
from tests.support.serving import WAIT_SECONDS, in_all, in_standing_group, open_gate, wait_at_gate
from tests.support.workers import RunWorkers, Worker


class Actor:
    """Says what has called it, and fails if two are at it at once."""

    def __init__(self, gate: str = "") -> None:
        if gate:
            wait_at_gate(gate)
        self.calls: list[Any] = []
        self.busy = threading.Lock()

    def note(self, call: Any, *_: Any) -> int:
        assert self.busy.acquire(blocking=False)
        self.calls.append(call)
        threading.Event().wait(0.001)  # others may try
        self.busy.release()
        return len(self.calls)

    async def note_later(self, call: Any) -> int:
        assert self.busy.acquire(blocking=False)
        self.calls.append(call)
        for _ in range(3):
            await asyncio.sleep(0)
        self.busy.release()
        return len(self.calls)

    def fail(self, call: Any) -> None:
        self.note(call)
        raise LookupError(call)

    def wait(self) -> None:
        wait_at_gate("in a method")

    def all(self) -> list[Any]:
        return self.calls


def mixed(rref: rpc.RRef[Actor], numbers: range) -> None:
    """Calls of every kind, by no means all awaited before the next."""
    futures: list[Any] = []
    made: list[rpc.RRef[Any]] = []
    for number in numbers:
        kind = number % 5
        if kind == 0:
            futures.append(rref.rpc_async().note_later(number))
        elif kind == 1:
            made.append(rref.remote().note(number))
        elif kind == 2:
            futures.append(rref.rpc_async().fail(number).then(lambda _: None))
        elif kind == 3:
            made.append(rref.remote().note_later(number))
        else:
            own = rref.is_owner()  # to oneself, what carries a reference may be overtaken
            futures.append(rref.rpc_async().note(number, None if own else rref))
    for each in (*futures, *(rref.to_here for rref in made)):
        each() if callable(each) else each.wait()


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
@in_standing_group()
def test_methods_run_one_at_a_time_in_order(owner: str) -> None:
    rref = rpc.remote(owner, Actor, args=("made",), concurrency=1)
    caller = threading.Thread(target=mixed, args=(rref, range(60)))
    caller.start()  # some come before the object is there
    rpc.rpc_sync(owner, open_gate, args=("made",))
    caller.join()
    assert rref.rpc_sync().all() == list(range(60))


_shared: list[rpc.RRef[Actor]] = []


def share(rref: rpc.RRef[Actor]) -> None:
    _shared.append(rref)


@in_all(world_size=3)
def test_each_callers_order_is_kept(worker: Worker) -> None:
    if worker.rank == 0:
        rref = rpc.remote("worker1", Actor, concurrency=1)
        for other in ("worker1", "worker2"):
            rpc.rpc_sync(other, share, args=(rref,))
        share(rref)
    rpc.barrier()
    mixed(_shared[0], range(1000 * worker.rank, 1000 * worker.rank + 40))
    rpc.barrier()
    if worker.rank == 0:
        calls = _shared[0].rpc_sync().all()
        assert len(calls) == 3 * 40
        for rank in range(3):
            mine = [call for call in calls if call // 1000 == rank]
            assert mine == sorted(mine)
    _shared.clear()


def open_gates_when_told() -> None:
    current_agent().messages.control.on("open gate", lambda peer, name: open_gate(name))


@in_standing_group()
def test_a_call_that_waits_for_its_turn_can_be_cancelled() -> None:
    rpc.rpc_sync("worker1", open_gates_when_told)
    rref = rpc.remote("worker1", Actor, concurrency=1)
    waiting = rref.rpc_async().wait()
    futures = [rref.rpc_async().note(number) for number in range(4)]
    assert futures[1].cancel()
    assert futures[2].cancel()
    agent = current_agent()  # control messages arrive in order: after what cancels the calls
    agent.messages.control.post(agent.group.peers.find("worker1"), "open gate", "in a method")
    waiting.wait()
    assert futures[3].wait() == 2
    assert rref.rpc_sync().all() == [0, 3]


@in_standing_group()
def test_as_many_as_said_run_at_a_time() -> None:
    rref = rpc.remote("worker1", Actor, concurrency=2)
    held = rref.rpc_async().wait()
    assert rref.rpc_sync(timeout=WAIT_SECONDS).note(1) == 1  # beside it
    rpc.rpc_sync("worker1", open_gate, args=("in a method",))
    held.wait()


@in_standing_group()
def test_an_object_that_was_not_made_answers_all() -> None:
    rref: rpc.RRef[Any] = rpc.remote("worker1", int, args=("x",), concurrency=1)
    futures = [rref.rpc_async().bit_length() for _ in range(3)]
    for future in futures:
        with pytest.raises(ValueError, match="'x'"):
            future.wait()
    wrong: Callable[..., Any] = rpc.remote
    for concurrency in (0, -1, "1", True, 1.0):
        with pytest.raises(ValueError, match="at least 1"):
            wrong("worker1", list, concurrency=concurrency)


held: list[Any] = []


def hold_a_busy_one() -> None:
    actor = rpc.remote("worker0", Actor, concurrency=1)
    held.extend((actor, actor.rpc_async().wait()))


def have_worker2_wait_for_its_turn() -> None:
    rpc.rpc_sync("worker2", wait_for_a_turn, args=(held[0],))


def wait_for_a_turn(actor: rpc.RRef[Actor]) -> None:
    held.append(actor.remote().note("of a lost worker"))
    rpc.rpc_sync("worker0", len, args=("it has arrived",))


def wait_until_worker2_is_lost() -> None:
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync("worker2", time.sleep, args=(60,))
    current_agent().group.on_loop(int)  # all are told of it in one go


def what_it_was_called_by() -> list[Any]:
    calls: list[Any] = held[0].rpc_sync(timeout=10).all()
    return calls


def test_a_creation_of_a_lost_worker_neither_runs_nor_keeps_its_turn(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3)
    ask(workers[1], hold_a_busy_one)
    workers[0].wait_for("at the gate")
    ask(workers[1], have_worker2_wait_for_its_turn)
    workers[2].kill()
    ask(workers[0], wait_until_worker2_is_lost)
    ask(workers[0], open_gate, "in a method")
    assert ask(workers[1], what_it_was_called_by) == []
    dismiss(workers)
