"""Workers that are silent: stopped ones are lost within ``lost_after``, busy ones never.

No call here has a time limit, so whoever is not told hangs until the test's own limit.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import WorkerLostError
from rpc.group.link import LinkState
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.serving import wait_at_gate
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

STOPPED = (
    r"worker 'worker1' \(id 1\) is gone: it has given no sign of life for 2 s, since about \d\d:\d\d:\d\d: "
)


def hold_interpreter_asleep(seconds: float) -> str:
    """A call into C that does not let go of the interpreter."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "awake"


def hold_interpreter_computing(seconds: float) -> str:
    """The same, computing: pieces of C code between which no other thread gets a turn."""
    begun = time.monotonic()
    rounds = 1 << 22
    while True:
        collections.deque(itertools.repeat(None, rounds), maxlen=0)
        took = time.monotonic() - begun
        if took > 0.2:
            break
        rounds, begun = rounds * 2, time.monotonic()
    collections.deque(itertools.repeat(None, int(rounds * seconds / took)), maxlen=0)
    return "computed"


def wait_for_a_stopped_worker(worker: Worker) -> list[str]:
    """What each way to wait raised, and what shutdown did."""
    with worker.group(rpc_timeout=0, lost_after=2):
        made = rpc.remote("worker1", wait_at_gate, args=("remote",))
        ways: dict[str, Callable[[], object]] = {
            "rpc_sync": lambda: rpc.rpc_sync("worker1", wait_at_gate, args=("rpc_sync",)),
            "future": rpc.rpc_async("worker1", wait_at_gate, args=("future",)).wait,
            "to_here": made.to_here,
            "barrier": rpc.barrier,
        }
        with ThreadPoolExecutor(len(ways)) as pool:
            running = [pool.submit(way) for way in ways.values()]
            errors = [each.exception() for each in running]
        assert all(isinstance(error, WorkerLostError) for error in errors), errors
        return [str(error) for error in errors]


def join_and_be_stopped(worker: Worker) -> None:
    with worker.group(rpc_timeout=0):
        worker.wait_for("never")


def test_whoever_waits_for_a_stopped_worker_is_told_within_the_bound(run_workers: RunWorkers) -> None:
    workers = run_workers.start([wait_for_a_stopped_worker, join_and_be_stopped])
    gates = {"rpc_sync", "future", "remote"}
    while gates:
        gates.discard(workers[1].wait_for("at the gate"))
    workers[1].stop()
    stopped = time.monotonic()
    errors = workers[0].result()
    took = time.monotonic() - stopped
    workers[1].kill()
    assert len(errors) == 4
    for error in errors:
        assert re.match(STOPPED + r"its process \(\d+\) is stopped", error), error
    assert took < 20  # 2 s, and what a loaded machine adds; without the option it were 30 s


def leave_with_a_stopped_worker(worker: Worker) -> None:
    worker.join(rpc_timeout=0, lost_after=2)
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
    worker.report("joined")
    worker.wait_for("shut down")
    rpc.shutdown()


def test_shutdown_waits_for_no_stopped_worker(run_workers: RunWorkers) -> None:
    workers = run_workers.start([leave_with_a_stopped_worker, join_and_be_stopped])
    workers[0].wait_for("joined")
    workers[1].stop()
    workers[0].tell("shut down")
    workers[0].result()
    workers[1].kill()
    assert "no sign of life" in workers[0].log.read_text()


def call_who_holds_the_interpreter(worker: Worker, hold: Callable[[float], Any], lost_after: float) -> Any:
    with worker.group(rpc_timeout=0, lost_after=lost_after):
        if worker.rank:
            return None
        return rpc.rpc_sync("worker1", hold, args=(2.5,))


@pytest.mark.parametrize(
    ("hold", "lost_after", "said"),
    [(hold_interpreter_asleep, 6.0, "awake"), (hold_interpreter_computing, 1.0, "computed")],
)
def test_who_holds_its_interpreter_is_not_lost(
    run_workers: RunWorkers, hold: Callable[[float], str], lost_after: float, said: str
) -> None:
    assert run_workers(call_who_holds_the_interpreter, 2, args=(hold, lost_after)) == [said, None]


def first_contact(worker: Worker) -> None:
    with worker.group(rpc_timeout=0):
        if worker.rank:
            worker.report("joined")
            worker.wait_for("leave")
            return
        worker.wait_for("call")
        future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), 1))
        peer = current_agent().group.peers.find("worker1")
        until(lambda: peer.link.state is LinkState.HANDSHAKING)
        worker.report("calling")
        assert future.wait() == 2


@backend.over_sockets  # of a stopped process, whose kernel goes on accepting
@pytest.mark.parametrize("seconds", [0.0, pytest.param(25.0, marks=pytest.mark.nightly)])
def test_the_first_contact_may_find_a_stopped_worker(run_workers: RunWorkers, seconds: float) -> None:
    workers = run_workers.start(first_contact, 2)
    workers[1].wait_for("joined")
    workers[1].stop()
    workers[0].tell("call")
    workers[0].wait_for("calling")
    time.sleep(seconds)  # how long it is stopped is what is tested
    workers[1].resume()
    workers[1].tell("leave")
    workers.results()
