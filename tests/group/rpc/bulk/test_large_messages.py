"""Large tensors over TCP, as between hosts: small calls go between, limits and deaths are errors of calls."""

from __future__ import annotations

import functools
import re
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import NoMemoryError, RemoteError, RpcTimeoutError, SerializationError
from tests.support import backend
from tests.support.orders import ask, dismiss, start_followers
from tests.support.serving import WAIT_SECONDS, first_of, in_group, in_worker0, serve
from tests.support.streams import until
from tests.support.transfers import ACROSS, MIB, begin_to_send, echo, small_call, total, waiting
from tests.support.workers import RunWorkers, Worker


@in_worker0(**ACROSS)
def test_a_reference_can_be_used_before_its_large_arguments_are_there() -> None:
    for _round in range(5):
        made = rpc.remote("worker1", echo, args=(torch.ones(4 * MIB),))
        size = rpc.rpc_async("worker1", torch.numel, args=(torch.ones(2 * MIB),))
        assert rpc.rpc_sync("worker1", _numel, args=(made,)) == 4 * MIB
        assert made.to_here().sum() == 4 * MIB
        assert size.wait() == 2 * MIB
        del made


def _numel(reference: rpc.RRef[torch.Tensor]) -> int:
    return reference.to_here().numel()


# ---- no memory

_HUGE = 256 * MIB
_ROOM = 128 * MIB
"""Memory for what a worker does besides. It may get some more, as its threads end."""


def has_room_for(size: int) -> None:
    """Let this process have that many bytes of memory more than it has, or any number for -1."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + address_space() if size >= 0 else size, hard))


def address_space() -> int:
    """Return what ``RLIMIT_AS`` limits, in bytes: it shrinks after the resident memory does."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def huge() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8).expand(_HUGE).clone()


@in_worker0(**ACROSS)
def test_a_message_without_memory_fails_its_call_and_the_connection_goes_on() -> None:
    # Its threads have their memory before the limit.
    assert rpc.rpc_sync("worker1", torch.numel, args=(huge(),)) == _HUGE
    rpc.rpc_sync("worker1", has_room_for, args=(_ROOM,))
    for ask_for in (
        lambda tensor: rpc.rpc_sync("worker1", torch.numel, args=(tensor,)),
        lambda tensor: rpc.rpc_async("worker1", torch.numel, args=(tensor,)).wait(),
        lambda tensor: rpc.remote("worker1", echo, args=(tensor,)).to_here(),
    ):
        with pytest.raises(NoMemoryError, match=r"a call from worker 'worker0' was dropped .* 268,43"):
            ask_for(huge())
        assert rpc.rpc_sync("worker1", echo, args=(1,)) == 1
    rpc.rpc_sync("worker1", has_room_for, args=(-1,))
    assert rpc.rpc_sync("worker1", torch.numel, args=(huge(),)) == _HUGE


@in_worker0(**ACROSS)
def test_an_answer_without_memory_fails_its_call_and_the_connection_goes_on() -> None:
    before = address_space()
    made = rpc.remote("worker1", huge)
    assert made.rpc_sync().numel() == _HUGE
    assert made.to_here().numel() == _HUGE  # threads have their memory before the limit
    until(lambda: address_space() < before + _HUGE)  # and what they have received is freed
    has_room_for(_ROOM)
    asks: list[Callable[[], Any]] = [lambda: rpc.rpc_sync("worker1", huge), made.to_here]
    for ask_for in asks:
        with pytest.raises(MemoryError, match=r"what worker 'worker1' sent was dropped .* 268,43"):
            ask_for()
        assert made.rpc_sync().numel() == _HUGE
    has_room_for(-1)
    assert made.to_here().numel() == _HUGE


# ---- limits


def small_limit_is_respected(_: Worker) -> None:
    with pytest.raises(SerializationError, match=r"4194\d+ bytes to worker 'worker1' is over .* max_message"):
        rpc.rpc_sync("worker1", total, args=(torch.ones(MIB),))
    assert rpc.rpc_sync("worker1", total, args=(torch.ones(1000),)) == 1000
    assert rpc.rpc_sync("worker1", total, args=(torch.ones(15_000),)) == 15_000


def limited_worker_cannot_be_sent_more(_: Worker) -> None:
    with pytest.raises(SerializationError, match="to worker 'worker1' is over"):
        rpc.rpc_sync("worker0", torch.ones, args=(MIB,))
    assert rpc.rpc_sync("worker0", torch.ones, args=(1000,)).sum() == 1000


def test_a_message_over_the_receivers_limit_is_an_error_of_that_call(run_workers: RunWorkers) -> None:
    limited = {**ACROSS, "max_message_bytes": MIB}
    run_workers([in_group(small_limit_is_respected, **ACROSS), functools.partial(serve, **limited)])


def test_an_answer_over_the_callers_limit_is_an_error_of_that_call(run_workers: RunWorkers) -> None:
    limited = {**ACROSS, "max_message_bytes": MIB}
    run_workers([functools.partial(serve, **ACROSS), in_group(limited_worker_cannot_be_sent_more, **limited)])


@in_worker0(**ACROSS, max_message_bytes=1)
def test_small_messages_are_accepted_whatever_the_limit() -> None:
    assert rpc.rpc_sync("worker1", echo, args=("x" * 60_000,)) == "x" * 60_000


class BulkyError(Exception):
    content: Any = None


def raise_long_text() -> None:
    raise BulkyError("x" * 2 * MIB)


def raise_with_tensor() -> None:
    error = BulkyError("bulky")
    error.content = torch.ones(MIB)
    raise error


def raise_long_text_beside_what_cannot_be_sent() -> None:
    raise BulkyError("x" * 2 * MIB, threading.Lock())


def errors_are_described(_: Worker) -> None:
    for function in (raise_long_text, raise_with_tensor, raise_long_text_beside_what_cannot_be_sent):
        with pytest.raises(
            RemoteError, match=r"BulkyError, raised by worker 'worker1': .*(bulky|xx)"
        ) as caught:
            rpc.rpc_sync("worker1", function, timeout=WAIT_SECONDS)
        assert len(str(caught.value)) + len(caught.value.remote_traceback) < MIB
        if function is raise_with_tensor:
            assert re.search(r"too large to be sent: .* 419\d+ bytes .* max_message_bytes", str(caught.value))
            assert "in raise_with_tensor" in caught.value.remote_traceback


@pytest.mark.parametrize("limit", [MIB, 1])
def test_an_error_over_the_callers_limit_is_described(run_workers: RunWorkers, limit: int) -> None:
    first_of(run_workers, errors_are_described, **ACROSS, max_message_bytes=limit)


# ---- peers that stop and die


def memory() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_a_sender_that_dies_in_the_middle_of_a_transfer_leaves_nothing(run_workers: RunWorkers) -> None:
    """The receiver lets go of the memory that it has received to."""
    workers = start_followers(run_workers, 3, **ACROSS, send_queue_bytes=1024 * MIB)
    assert ask(workers[0], small_call, "worker1") == 1
    assert ask(workers[2], small_call, "worker1") == 1
    before = ask(workers[1], memory)
    workers[1].stop()
    ask(workers[0], begin_to_send, 8)
    workers[1].resume()
    workers[0].kill()
    assert ask(workers[2], small_call, "worker1") == 1
    assert ask(workers[1], shrinks_to, before + 100 * MIB)
    dismiss(workers)


def shrinks_to(limit: int) -> bool:
    deadline = time.monotonic() + 15
    while memory() > limit and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return memory() <= limit


def times_out_in_time(count: int) -> bool:
    """Fill the queue to a worker that does not read, and call it once more."""
    tensor = torch.ones(MIB)
    waiting.extend(rpc.rpc_async("worker1", total, args=(tensor,), timeout=0) for _ in range(count))
    begin = time.monotonic()
    with pytest.raises(RpcTimeoutError, match="total on worker 'worker1'"):
        rpc.rpc_sync("worker1", total, args=(tensor,), timeout=0.3)
    return time.monotonic() - begin < 10


def all_arrive() -> bool:
    return all(future.wait() == MIB for future in waiting)


def test_a_timeout_ends_the_wait_for_room_in_the_queue(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 2, **ACROSS, send_queue_bytes=2 * MIB)
    assert ask(workers[0], small_call, "worker1") == 1
    workers[1].stop()
    assert ask(workers[0], times_out_in_time, 1)
    workers[1].resume()
    assert ask(workers[0], all_arrive)
    assert ask(workers[0], small_call, "worker1") == 1
    dismiss(workers)


# ---- speed and memory


@backend.over_sockets  # gRPC keeps some tens of megabytes on their way
def test_sending_takes_no_memory_and_receiving_takes_it_once(run_workers: RunWorkers) -> None:
    size = 128 * MIB

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def task(_: Worker) -> None:
        tensor = torch.ones(size // 4)
        rpc.rpc_sync("worker1", echo, args=(1,))
        here, there = peak(), rpc.rpc_sync("worker1", peak)
        rpc.rpc_sync("worker1", torch.numel, args=(tensor,))
        assert peak() - here < size // 8
        assert rpc.rpc_sync("worker1", peak) - there < size + size // 8

    first_of(run_workers, task, **ACROSS)
