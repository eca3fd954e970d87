"""Strangers in numbers do a worker no harm; what they may say is in ``unit/rpc/group/test_greeting.py``."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

import rpc
from rpc.wire.frames import PREAMBLE
from tests.support.hostile import Hostile, Target, target
from tests.support.serving import first_of, in_group, serve
from tests.support.workers import RunWorkers, Worker, WorkerProcess


def my_name(*_: Any) -> str:
    return rpc.get_worker_info().name


def log_lines(worker: WorkerProcess) -> list[str]:
    return worker.log.read_text().splitlines()


def memory() -> int:
    """The most that this process has ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def come_in_crowds(_: Worker) -> int:
    at: Target = rpc.rpc_sync("worker1", target)
    before = rpc.rpc_sync("worker1", memory)
    for _crowd in range(20):
        with contextlib.ExitStack() as crowd:
            peers = [crowd.enter_context(Hostile(at)) for _ in range(20)]
            for peer in peers:
                peer.say(PREAMBLE, bytes(20_000))  # an empty frame of kind 0, many times
            assert all(peer.is_hung_up() for peer in peers)
    return int(rpc.rpc_sync("worker1", memory)) - int(before)


def test_strangers_take_no_memory(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, come_in_crowds) < 30


def limit_descriptors() -> None:
    """Leaves this process no more than a few descriptors to open."""
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def take_all_descriptors(_: Worker) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    rpc.rpc_sync("worker1", limit_descriptors)
    with contextlib.ExitStack() as crowd:
        for _number in range(40):
            crowd.enter_context(Hostile(at))
        rpc.rpc_sync("worker1", my_name)  # whom one knows one goes on talking to
    with Hostile(at) as peer:
        peer.say(b"hello?")
        assert peer.is_hung_up()
    return str(rpc.rpc_sync("worker1", my_name))


def test_a_worker_out_of_descriptors_says_so_once_and_recovers(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(take_all_descriptors), serve])
    assert workers.results() == ["worker1", None]
    warnings = [line for line in log_lines(workers[1]) if "cannot accept connections on unix:@" in line]
    assert len(warnings) == 1
    assert "Too many open files" in warnings[0]
