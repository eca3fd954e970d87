"""Bulk messages between workers: into posted buffers and in order, over every way that leads there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.agent.agent import Agent
from rpc.bulk.matching import WINDOW
from rpc.bulk.point_to_point import Bulk
from rpc.bulk.transfer import Transfer
from rpc.errors import (
    BlockingCallError,
    ForkedProcessError,
    NotInitializedError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    WorkerLostError,
)
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from tests.group.rpc.runtime.test_fork import in_child
from tests.support import backend
from tests.support.interrupting import interrupted
from tests.support.serving import entering, in_standing, in_standing_group, in_worker0, serve
from tests.support.shared_memory import echo_through_segments, mapped_segments
from tests.support.standing import Shared
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

MIB = 1 << 20
SOON = 20.0
OVER_CONNECTIONS: dict[str, Any] = {
    "unix": {"transports": ("unix",), "shared_memory_bytes": 0},
    "tcp": pytest.param({"transports": ("tcp",), "shared_memory_bytes": 0}, marks=pytest.mark.nightly),
    "stripes": {"transports": ("tcp",), "shared_memory_bytes": 0, "tcp_stripes": 3},
}
if backend.NAME == "grpc":
    OVER_CONNECTIONS = {"grpc": {"shared_memory_bytes": 0}}
WAYS: dict[str, Any] = {"shared memory": {}} | OVER_CONNECTIONS
every_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def bulk() -> Bulk:
    agent: Agent = current_agent()
    return agent.messages.bulk


def other(worker: Worker) -> Peer:
    return peer(1 - worker.rank)


def peer(rank: int) -> Peer:
    agent: Agent = current_agent()
    return agent.group.peers.find(f"worker{rank}")


def numbers(size: int, first: int = 0) -> torch.Tensor:
    """Bytes that tell where they belong."""
    first %= 251
    return torch.arange(251, dtype=torch.uint8).repeat(size // 251 + 2)[first : first + size]


def send_back(tag: int, data: bytes) -> None:
    """To be called remotely: sends to worker0."""
    bulk().send(current_agent().group.peers.find("worker0"), tag, data)


def both(run_workers: RunWorkers, task: Callable[[Worker], object], **options: Any) -> None:
    """Run a task in two workers, which stay for all such tests with these options."""
    run_workers(Shared(entering(**options), task), 2)


SIZES = [0, 8, 64 << 10, (64 << 10) + 1, 300_000, 3 * MIB, 40 * MIB]


@every_way
def test_messages_of_any_size_fill_the_posted_buffers_in_order(
    run_workers: RunWorkers, options: dict[str, Any]
) -> None:
    def task(worker: Worker) -> None:
        for early in (True, False) * 2:
            buffers = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]

            def post(buffers: list[torch.Tensor] = buffers) -> list[Transfer]:
                return [bulk().post(other(worker), 7, each.numpy()) for each in buffers]

            posts = [] if early else post()
            sent = [
                bulk().send(other(worker), 7, numbers(size, worker.rank + n).numpy())
                for n, size in enumerate(SIZES)
            ]
            posts = posts or post()
            for n, transfer in enumerate(posts):
                transfer.wait(SOON)
                assert torch.equal(buffers[n], numbers(SIZES[n], 1 - worker.rank + n))
            for transfer in sent:
                transfer.wait(SOON)
        assert bool(mapped_segments()) == (not options)

    both(run_workers, task, **options)


@every_way
def test_a_message_is_gathered_from_buffers_and_scattered_to_others(
    run_workers: RunWorkers, options: dict[str, Any]
) -> None:
    def task(worker: Worker) -> None:
        for size in (1_000, 200_000, 5 * MIB) * 2:
            whole = numbers(size)
            parts = [
                each.numpy() for each in (whole[:10], whole[10:10], whole[10 : size // 2], whole[size // 2 :])
            ]
            targets = [torch.zeros(each, dtype=torch.uint8) for each in (size // 3, 0, size - size // 3)]
            received = bulk().post(other(worker), 1, [each.numpy() for each in targets])
            sent = bulk().send(other(worker), 1, parts)
            received.wait(SOON)
            assert torch.equal(torch.cat(targets), whole)
            sent.wait(SOON)

    both(run_workers, task, **options)


@every_way
def test_without_a_buffer_the_receiver_gets_the_message_s_own(
    run_workers: RunWorkers, options: dict[str, Any]
) -> None:
    def task(worker: Worker) -> None:
        for size in (8, 200_000, 5 * MIB) * 2:
            sent = bulk().send(other(worker), 1, [numbers(size).numpy()])
            (view,) = bulk().post(other(worker), 1).wait(SOON)
            tensor = torch.frombuffer(view, dtype=torch.uint8)
            assert torch.equal(tensor, numbers(size))
            tensor.zero_()  # it is the receiver's
            sent.wait(SOON)

    both(run_workers, task, **options)


@pytest.mark.parametrize("options", OVER_CONNECTIONS.values(), ids=OVER_CONNECTIONS)
def test_a_buffer_whose_post_is_cancelled_while_it_is_filled_is_the_caller_s_again(
    run_workers: RunWorkers, options: dict[str, Any]
) -> None:
    def task(worker: Worker) -> None:
        size = 64 * MIB
        if worker.rank == 1:
            bulk().post(other(worker), 2).wait(SOON)
            bulk().send(other(worker), 1, numbers(size, 1).numpy()).wait(SOON)
            return
        cancelled, following = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        first = bulk().post(other(worker), 1, cancelled.numpy())
        bulk().send(other(worker), 2, b"posted")
        until(lambda: cancelled[0] or first.done())
        if not first.cancel():  # all of it is here already
            first.wait(SOON)
            return
        cancelled.zero_()
        bulk().post(other(worker), 1, following.numpy()).wait(SOON)
        assert torch.equal(following, numbers(size, 1))
        assert not cancelled.any()

    both(run_workers, task, **options)


@in_standing(Worker.group, 2)
def test_a_worker_can_send_to_itself(worker: Worker) -> None:
    me = current_agent().group.peers.find(f"worker{worker.rank}")
    for size in (8, 5 * MIB):
        into = torch.zeros(size, dtype=torch.uint8)
        received = bulk().post(me, 3, into.numpy())
        sent = bulk().send(me, 3, numbers(size).numpy())
        received.wait(SOON)
        sent.wait(SOON)
        assert torch.equal(into, numbers(size))


# ---- mistakes, time, and the ends of things


@in_worker0(max_message_bytes=MIB)
def test_what_cannot_be_sent_or_posted_is_an_error_at_once() -> None:
    peer = current_agent().group.peers.find("worker1")
    for tag in (-1, 1 << 32, "1"):
        with pytest.raises(ValueError, match="a tag is a number"):
            bulk().send(peer, tag, b"")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="read-only"):
        bulk().post(peer, 1, b"12345678")
    with pytest.raises(TypeError):
        bulk().send(peer, 1, memoryview(bytes(16))[::2])
    with pytest.raises(SerializationError, match="max_message_bytes"):
        bulk().send(peer, 1, bytes(2 * MIB))


@in_standing_group()
def test_a_timeout_leaves_a_transfer_under_way_and_cancelling_ends_it() -> None:
    peer = current_agent().group.peers.find("worker1")
    into, last = bytearray(8), bytearray(8)
    posted = bulk().post(peer, 3, into)
    with pytest.raises(RpcTimeoutError, match=r"from worker 'worker1' \(tag 3\)"):
        posted.wait(0.05)
    cancelled, following = bulk().post(peer, 3, into), bulk().post(peer, 3, last)
    assert cancelled.cancel("the step was aborted")
    assert not cancelled.cancel()
    with pytest.raises(RpcError, match="the step was aborted"):
        cancelled.wait()
    rpc.rpc_sync("worker1", send_back, args=(3, b"first..."))
    rpc.rpc_sync("worker1", send_back, args=(3, b"second.."))
    posted.wait(SOON)
    following.wait(SOON)
    assert into == b"first..."
    assert last == b"second.."
    assert not posted.cancel()


@in_standing_group()
def test_ctrl_c_ends_a_wait_and_leaves_the_transfer_under_way() -> None:
    into = bytearray(8)
    posted = bulk().post(peer(1), 3, into)
    interrupted(posted.wait)
    rpc.rpc_sync("worker1", send_back, args=(3, b"12345678"))
    posted.wait(SOON)
    assert into == b"12345678"


def wait_for_the_dead(worker: Worker) -> None:
    with worker.group():
        echo_through_segments("worker1", 5 * MIB)
        rpc.rpc_sync("worker1", send_back, args=(5, b"before"))
        peer = current_agent().group.peers.find("worker1")
        failing = [bulk().post(peer, tag, bytearray(8)) for tag in (1, 1, 2)]
        failing += [bulk().send(peer, 3, bytes(each)) for each in (2 * WINDOW, 8)][1:]
        told: list[Transfer] = []
        failing[0].on_done(told.append)
        waiting = threading.Thread(target=failing[1].error)
        waiting.start()
        worker.report("ready")
        for each in failing:
            with pytest.raises(WorkerLostError, match="worker1") as caught:
                each.wait(SOON)
            assert caught.value.worker == "worker1"
        assert told == [failing[0]]
        into = bytearray(6)
        bulk().post(peer, 5, into).wait(SOON)
        assert into == b"before"  # what came before the end
        for again in (bulk().post, bulk().send):
            with pytest.raises(WorkerLostError):
                again(peer, 1, bytearray(8))


def test_all_that_waits_for_a_worker_that_is_killed_fails_and_names_it(run_workers: RunWorkers) -> None:
    workers = run_workers.start([wait_for_the_dead, serve], 2)
    workers[0].wait_for("ready")
    workers[1].kill()
    workers.results()


def test_a_worker_that_leaves_ends_what_is_under_way(run_workers: RunWorkers) -> None:
    def task(worker: Worker) -> None:
        with worker.group():
            posted = bulk().post(other(worker), 3, bytearray(8))
            mine = bulk()
            peer = other(worker)
        with pytest.raises((NotInitializedError, WorkerLostError)):
            posted.wait(SOON)
        with pytest.raises((NotInitializedError, WorkerLostError)):
            mine.post(peer, 4, bytearray(8))

    run_workers([task, task], 2)


@in_standing(Worker.group, 2)
def test_in_a_forked_child_all_has_ended_and_the_parent_goes_on(worker: Worker) -> None:
    into = bytearray(8)
    posted = bulk().post(other(worker), 3, into)
    mine, peer = bulk(), other(worker)

    def child() -> bool:
        with pytest.raises(ForkedProcessError):
            posted.wait(SOON)
        with pytest.raises(ForkedProcessError):
            mine.send(peer, 3, b"")
        return True

    assert in_child(child)
    bulk().send(other(worker), 3, b"12345678").wait(SOON)
    posted.wait(SOON)
    assert into == b"12345678"


@in_standing(Worker.group, 2)
def test_the_agent_s_own_thread_must_not_wait(worker: Worker) -> None:
    posted = bulk().post(other(worker), 3, bytearray(8))

    def wait() -> None:
        with pytest.raises(BlockingCallError):
            posted.wait(SOON)

    current_agent().group.on_loop(wait)
    posted.cancel()
