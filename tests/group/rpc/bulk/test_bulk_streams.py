"""Large tensors over bulk streams: they arrive whole, whatever becomes of one of the streams."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc
from benchmarks.striping import limit_connections
from rpc.bulk import stream_ends
from rpc.errors import MessageLostError
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.orders import ask, dismiss, follow_orders, start_followers
from tests.support.serving import first_of, in_group, report
from tests.support.streams import until
from tests.support.transfers import ACROSS, MIB, all_are_lost, begin_to_send, echo, small_call, total
from tests.support.workers import RunWorkers, Worker

pytestmark = backend.over_sockets

STREAMED: dict[str, Any] = {**ACROSS, "tcp_stripes": 4}


def connections() -> Iterator[socket.socket]:
    """Duplicates of the TCP sockets of this process that are connected."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as sock:
                    if sock.family == socket.AF_INET and sock.getpeername():
                        yield sock


def count_connections() -> int:
    return len(list(connections()))


def bytes_sent() -> dict[tuple[int, int], int]:
    """How much has arrived of what was sent on each connection, by its ports here and at the other side."""
    tcp_info, acknowledged = struct.Struct("=8B24I2QQ"), -1
    return {
        (sock.getsockname()[1], sock.getpeername()[1]): tcp_info.unpack(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.size)
        )[acknowledged]
        for sock in connections()
    }


def has_only(count: int) -> bool:
    until(lambda: count_connections() == count)
    return True


def open_streams(name: str = "worker1", count: int = 4) -> bool:
    """Send what streams are opened after, until there are ``count`` for each direction."""
    before = 0

    def settled() -> bool:
        """A spare connection, where both have connected at once, is closed."""
        nonlocal before
        counts = set()
        for _ in range(20):
            rpc.rpc_sync(name, echo, args=(1,))
            counts.add(count_connections())
        before = min(counts)
        return len(counts) == 1

    until(settled)

    def opened() -> bool:
        rpc.rpc_sync(name, total, args=(torch.ones(MIB),))
        return count_connections() >= before + 2 * count

    until(opened)
    for _ in range(20):  # the last of them may only just have begun to connect
        opened()
    return True


def exchange(name: str = "worker1", seed: int = 1) -> bool:
    """Large and small calls at once, both ways; what was sent is changed as soon as it is answered."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 16_384, 65_537, 163_839, 163_841, 163_841, 262_145, 2 * MIB + 1]
    sent = [torch.randint(0, 256, (size,), dtype=torch.int32, generator=generator) for size in sizes]
    sent.append(torch.arange(MIB // 2).view(1024, -1).T)
    futures = [rpc.rpc_async(name, echo, args=(tensor,)) for tensor in sent]
    small = [rpc.rpc_sync(name, echo, args=(index,)) for index in range(50)]
    equal = []
    for future, tensor in zip(futures, sent, strict=True):
        equal.append(torch.equal(future.wait(), tensor))
        tensor.fill_(-1)
    return small == list(range(50)) and all(equal)


def test_all_send_to_all_while_streams_are_opened_and_after(run_workers: RunWorkers) -> None:
    def task(worker: Worker) -> None:
        for round_ in range(2):
            for other in range(3):
                if other != worker.rank:
                    assert exchange(f"worker{other}", round_)

    run_workers(in_group(task, **STREAMED), 3)


def test_streams_multiply_what_one_connection_gets(run_workers: RunWorkers) -> None:
    """Each connection is limited to 5 MB/s: none takes most of 16 MB."""

    def task(_: Worker) -> list[int]:
        open_streams()
        limit_connections(5 * MIB)
        before = bytes_sent()
        assert rpc.rpc_sync("worker1", total, args=(torch.ones(4 * MIB),)) == 4 * MIB
        return [sent - before.get(ports, 0) for ports, sent in bytes_sent().items()]

    sent = first_of(run_workers, task, **STREAMED)
    assert sum(sent) > 12 * MIB  # the last of it may not be acknowledged yet
    assert max(sent) < 16 * MIB * 0.7


def test_a_small_call_does_not_wait_for_a_large_one(run_workers: RunWorkers) -> None:
    def task(_: Worker) -> bool:
        open_streams()
        limit_connections(MIB // 2)  # the large one would take some seconds
        large = rpc.rpc_async("worker1", total, args=(torch.ones(4 * MIB),))
        rpc.rpc_sync("worker1", echo, args=(1,))
        waited = large.done()
        limit_connections(1000 * MIB)
        assert large.wait() == 4 * MIB
        return waited

    assert first_of(run_workers, task, **STREAMED) is False


@pytest.mark.parametrize(("mine", "other"), [(4, 2), (4, 0), (0, 4)], ids=str)
def test_two_workers_may_want_different_numbers(run_workers: RunWorkers, mine: int, other: int) -> None:
    def follow(worker: Worker, streams: int) -> None:
        follow_orders(worker, **ACROSS, tcp_stripes=streams)

    workers = run_workers.start([functools.partial(follow, streams=each) for each in (mine, other)])
    workers.wait_for("ready")
    for asks in (0, 1, 0):
        assert ask(workers[asks], exchange, f"worker{1 - asks}")
    dismiss(workers)


# ---- the end


def threads() -> int:
    return int(current_agent().messages.bulk_streams.threads)


def test_threads_of_streams_are_bounded_and_end_when_nothing_is_sent(run_workers: RunWorkers) -> None:
    def task(_: Worker) -> int:
        stream_ends.IDLE_SECONDS = 0.1  # in this process only
        open_streams()
        stop, counts = threading.Event(), [0]

        def watch() -> None:
            while not stop.wait(0.001):
                counts.append(threads())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for seed in range(3):
            assert exchange(seed=seed)
        stop.set()
        watcher.join()
        until(lambda: not threads())
        assert exchange()  # others are started
        until(lambda: not threads())
        return max(counts)

    assert 0 < first_of(run_workers, task, **STREAMED) <= 2 * STREAMED["tcp_stripes"]


@pytest.mark.parametrize("victim", [0, 1], ids=["the sender", "the receiver"])
def test_a_worker_that_dies_in_the_middle_of_a_transfer(run_workers: RunWorkers, victim: int) -> None:
    workers = start_followers(run_workers, 3, **STREAMED, send_queue_bytes=1024 * MIB)
    survivor = workers[1 - victim]
    assert ask(survivor, small_call, "worker2") == 1
    before = ask(survivor, count_connections)
    assert ask(workers[0], open_streams)
    workers[1].stop()
    ask(workers[0], begin_to_send, 3)
    if victim == 0:
        workers[1].resume()
    workers[victim].kill()
    if victim == 1:
        assert ask(workers[0], all_are_lost) == 3
    assert ask(survivor, has_only, before)
    assert ask(survivor, small_call, "worker2") == 1
    dismiss(workers)


def break_a_connection() -> None:
    for connection in connections():
        connection.shutdown(socket.SHUT_RDWR)
        return


def slow_down(bytes_per_second: int) -> bool:
    return limit_connections(bytes_per_second) > 0


@pytest.mark.parametrize("breaker", [0, 1], ids=["at its sender", "at its receiver"])
def test_the_end_of_a_stream_is_that_of_the_connection(run_workers: RunWorkers, breaker: int) -> None:
    workers = start_followers(run_workers, 2, **STREAMED, send_queue_bytes=1024 * MIB)
    assert ask(workers[0], open_streams)
    assert ask(workers[0], slow_down, MIB)  # the first message takes a quarter of a minute
    ask(workers[0], begin_to_send, 3)
    ask(workers[breaker], break_a_connection)
    assert ask(workers[0], all_are_lost, MessageLostError) == 3
    dismiss(workers)


def big_answer() -> torch.Tensor:
    report("answering")
    return torch.ones(8 * MIB)


def fetch() -> float:
    open_streams()
    assert rpc.rpc_sync("worker1", slow_down, args=(10 * MIB,))
    return total(rpc.rpc_sync("worker1", big_answer))


class LeaveAtOnceError(Exception):
    pass


def answer_and_leave(worker: Worker) -> None:
    with contextlib.suppress(LeaveAtOnceError), worker.group(**STREAMED):
        worker.wait_for("leave")
        until(lambda: rpc.get_debug_info()["agent.active_tasks"] == 0)
        raise LeaveAtOnceError  # and do not wait for the other


def test_what_was_answered_before_leaving_arrives(run_workers: RunWorkers) -> None:
    """The answer takes most of a second over the streams, the goodbye none on the connection."""
    workers = run_workers.start([in_group(lambda _: fetch(), **STREAMED), answer_and_leave])
    workers[1].wait_for("answering")
    workers[1].tell("leave")
    assert workers[0].result() == 8 * MIB


def test_neither_a_forked_child_nor_shutdown_leaves_sockets(run_workers: RunWorkers) -> None:
    """Else a worker's peers would not notice its death as long as its child lives."""

    def task(worker: Worker) -> None:
        before = count_connections()
        with worker.group(**STREAMED):
            if worker.rank == 0:
                open_streams()
                child = os.fork()
                if not child:
                    os._exit(count_connections())
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert exchange()
        assert count_connections() <= before

    run_workers(task, 2)
