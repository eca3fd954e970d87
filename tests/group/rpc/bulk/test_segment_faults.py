"""Shared memory when things go wrong: deaths, broken links, limits, forks, receivers that keep everything."""

from __future__ import annotations

import ctypes
import logging
import resource
import threading
from collections.abc import Callable

import pytest
import torch

import rpc
from rpc.bulk import copying
from rpc.bulk.shared_memory.memory import Ledger
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.leftovers import nothing_left
from tests.support.serving import first_of, in_worker0, open_gate, serve, wait_at_gate
from tests.support.shared_memory import (
    all_returned,
    arriving_in_segment,
    echo_through_segments,
    in_segment,
    mapped_segments,
    send_through_segments,
)
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

MIB = 1 << 20

kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> bool:
    """Keeps a tensor for ever; whether it lies in a segment."""
    kept.append(tensor)
    return in_segment(tensor)


def kept_sums() -> list[float]:
    return [float(tensor.sum()) for tensor in kept]


def forget() -> None:
    kept.clear()


def memory(kind: str) -> int:
    """Of this process, in bytes."""
    with open("/proc/self/status") as status:
        found = next(line for line in status if line.startswith(kind))
    return int(found.split()[1]) << 10


def has_no_segments() -> bool:
    return not mapped_segments(1)


# ---- memory stays within bounds


@in_worker0(shared_memory_bytes=8 * MIB)
def test_a_receiver_that_keeps_everything_gets_the_rest_through_the_socket() -> None:
    send_through_segments("worker1", MIB)
    shared = [rpc.rpc_sync("worker1", keep, args=(torch.full((MIB // 4,), float(i)),)) for i in range(40)]
    assert 2 <= shared.count(True) <= 8
    assert not any(shared[20:])
    assert sum(end - begin for begin, end in mapped_segments()) <= 8 * MIB
    assert rpc.rpc_sync("worker1", kept_sums) == [i * MIB / 4 for i in range(40)]
    rpc.rpc_sync("worker1", forget)
    send_through_segments("worker1", MIB)


def memory_in_use() -> int:
    """Bytes that this process has, without those that lie free but stay with it.

    The ends of arenas other than the first are not given back here, but by ``free``, unless the agent has it
    keep them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
    return memory("VmRSS")


@in_worker0(kept_memory_bytes=0)
def test_many_transfers_leave_memory_where_it_was() -> None:
    tensor = torch.ones(50_000)
    before = 0
    for count in (1_000, 3_000):
        for _batch in range(count // 50):
            futures = [rpc.rpc_async("worker1", torch.neg, args=(tensor,)) for _ in range(50)]
            assert float(futures[-1].wait()[-1]) == -1.0
            for future in futures:
                future.wait()
        del future, futures
        now = memory_in_use() + rpc.rpc_sync("worker1", memory_in_use)
        assert not before or now - before < 48 * MIB, (before, now)
        before = now
    assert len(mapped_segments()) <= 128


def test_sending_takes_the_size_of_the_tensor_at_either_side_and_no_more(run_workers: RunWorkers) -> None:
    size = 96 * MIB

    def task(_: Worker) -> None:
        tensor = torch.ones(size, dtype=torch.uint8)
        rpc.rpc_sync("worker1", memory, args=("VmRSS",))
        here, there = memory("VmRSS"), rpc.rpc_sync("worker1", memory, args=("VmRSS",))
        for _attempt in range(4):
            assert rpc.rpc_sync("worker1", torch.numel, args=(tensor,)) == size
        assert memory("VmHWM") - here < size * 1.25
        taken_there = rpc.rpc_sync("worker1", memory, args=("VmHWM",)) - there
        assert taken_there < size * 1.25 + backend.RECEIVERS_BYTES

    first_of(run_workers, task)


@in_worker0()
def test_a_call_that_was_given_up_returns_its_memory() -> None:
    send_through_segments("worker1", MIB)
    tensor = torch.ones(MIB // 4)
    future = rpc.rpc_async("worker1", wait_at_gate, args=("", tensor), timeout=0.2)
    with pytest.raises(RuntimeError, match="timeout"):
        future.wait()
    rpc.rpc_sync("worker1", open_gate)
    until(all_returned)


# ---- deaths


def act_and_outlive(worker: Worker) -> None:
    """Fills segments in both directions with worker1, which dies, and looks at what is left."""
    with worker.group():
        echo_through_segments("worker1", MIB)
        mine = torch.arange(MIB // 4, dtype=torch.int32)
        back = arriving_in_segment(lambda: rpc.rpc_sync("worker1", torch.neg, args=(mine,)))
        worker.report("ready")
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync("worker1", wait_at_gate, args=("", mine))
        until(lambda: len(mapped_segments()) <= 1)
        assert torch.equal(back, -mine)
        back += 1
        del back
        until(has_no_segments)


def test_who_outlives_a_peer_keeps_what_it_received_and_nothing_else(run_workers: RunWorkers) -> None:
    workers = run_workers.start([act_and_outlive, serve], 2)
    workers[0].wait_for("ready")
    workers[1].wait_for("at the gate")
    workers[1].kill()
    workers.results()


def die_while_copying(worker: Worker) -> None:
    with worker.group():
        send_through_segments("worker1", 4 * MIB, keep)

        def copy_half_and_die(source: memoryview | bytes, target: memoryview) -> None:
            target[: len(source) // 2] = source[: len(source) // 2]
            worker.die()

        copying.copy = copy_half_and_die
        while True:
            rpc.rpc_sync("worker1", torch.numel, args=(torch.zeros(MIB),))


def outlive_the_sender(worker: Worker) -> None:
    with worker.group():
        until(lambda: kept)
        until(lambda: current_agent().group.peers.find("worker0").lost)
        until(lambda: in_segment(kept[-1]) and len(mapped_segments()) == 1)
        assert set(kept_sums()) == {4 * MIB}
        forget()
        until(has_no_segments)


def test_a_sender_that_dies_in_the_middle_leaves_nothing_behind(run_workers: RunWorkers) -> None:
    run_workers([die_while_copying, outlive_the_sender], 2)


# ---- links


def lose_link_and_live(worker: Worker) -> None:
    with worker.group(), nothing_left():
        send_through_segments("worker1", MIB, keep)
        agent = current_agent()
        agent.group.on_loop(
            agent.group.connections.lose, agent.group.peers.find("worker1"), "the test cuts it off"
        )
        assert agent.messages.shared_memory.usage() == (0, 0)
        until(has_no_segments)
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync("worker1", keep, args=(torch.zeros(MIB),))
        worker.report("cut off")
        worker.wait_for("leave")


def live_on(worker: Worker) -> None:
    with worker.group():
        worker.wait_for("look")
        assert set(kept_sums()) == {MIB}
        assert in_segment(kept[-1])


def test_a_segment_whose_link_is_lost_is_not_used_again(run_workers: RunWorkers) -> None:
    workers = run_workers.start([lose_link_and_live, live_on], 2)
    workers[0].wait_for("cut off")
    workers[1].tell("look")
    workers[0].tell("leave")
    workers.results()


# ---- what cannot be shared goes through the socket, and the log says so once


def fall_back(_: Worker, reason: str, prepare: Callable[[], object] = int) -> None:
    """Sends what must go through the socket, ``reason`` being what the log says."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rpc").addHandler(handler)
    prepare()
    until(lambda: rpc.rpc_sync("worker1", torch.numel, args=(torch.ones(MIB),)) and said)
    for _attempt in range(5):
        assert rpc.rpc_sync("worker1", torch.numel, args=(torch.ones(MIB),)) == MIB
    assert len(said) == 1
    assert "large tensors for worker 'worker1' go through the socket" in said[0]
    assert reason in said[0]
    assert current_agent().messages.shared_memory.usage() == (0, 0)


def read_another_nonce() -> None:
    Ledger.nonce = lambda self: bytes(32)  # type: ignore[method-assign]


def open_no_more_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))


def open_files_again() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


OBSTACLES: dict[str, tuple[Callable[[], None], str, str]] = {
    "other memory": (read_another_nonce, "worker1", "what is written here is not what is read there"),
    "no more files": (open_no_more_files, "worker1", "Too many open files"),
}


@pytest.mark.parametrize(("obstruct", "where", "reason"), OBSTACLES.values(), ids=OBSTACLES)
@in_worker0()
def test_what_cannot_be_shared_goes_through_the_socket(
    worker: Worker, obstruct: Callable[[], None], where: str, reason: str
) -> None:
    fall_back(worker, reason, lambda: rpc.rpc_sync(where, obstruct))
    rpc.rpc_sync(where, open_files_again)  # the store of the rendezvous needs one to end


# ---- strange users


@in_worker0()
def test_tensors_that_change_while_they_are_sent_do_no_harm() -> None:
    send_through_segments("worker1", 4 * MIB)
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            tensor.add_(1)

    changer = threading.Thread(target=change)
    changer.start()
    for _attempt in range(10):
        assert rpc.rpc_sync("worker1", torch.numel, args=(tensor,)) == 4 * MIB
    stop.set()
    changer.join()
