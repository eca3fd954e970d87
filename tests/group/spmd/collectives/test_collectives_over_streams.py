"""Collectives of large tensors over bulk streams, and what becomes of them when a stream or a rank fails
in the middle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rpc
from benchmarks.striping import limit_connections
from rpc.bulk.streams import _Streams
from spmd.collectives.errors import CollectiveError
from tests.support import backend
from tests.support.process_groups import process_group
from tests.support.serving import in_processes
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

pytestmark = backend.over_sockets

MIB = 1 << 20
COUNT = 4 * MIB
"""Elements of 4 bytes: 16 MiB."""
SLOW_BYTES = 20 * MIB
"""What a connection is let through in a second."""
SLOWEST_BYTES = MIB
"""The same where a rank is to be struck before the operation is over."""


def options() -> rpc.AgentOptions:
    return rpc.AgentOptions(shared_memory_bytes=0, transports=["tcp"])


def all_reduce(rank: int, into: torch.Tensor) -> None:
    into.fill_(rank + 1)
    dist.all_reduce(into)
    assert (into == 3).all()


def broadcast(rank: int, into: torch.Tensor) -> None:
    into.fill_(rank)
    dist.broadcast(into, 1)
    assert (into == 1).all()


def all_gather(rank: int, into: torch.Tensor) -> None:
    into.zero_()
    dist.all_gather_into_tensor(into, torch.full((COUNT // 2,), rank + 1.0))
    assert (into[: COUNT // 2] == 1).all()
    assert (into[COUNT // 2 :] == 2).all()


def reduce_scatter(rank: int, into: torch.Tensor) -> None:
    into.zero_()
    dist.reduce_scatter_tensor(into[: COUNT // 2], torch.full((COUNT,), rank + 1.0))
    assert (into[: COUNT // 2] == 3).all()


def all_to_all(rank: int, into: torch.Tensor) -> None:
    into.zero_()
    dist.all_to_all_single(into, torch.full((COUNT,), rank + 1.0))
    assert (into[: COUNT // 2] == 1).all()
    assert (into[COUNT // 2 :] == 2).all()


Operation = Callable[[int, torch.Tensor], None]
OPERATIONS: tuple[Operation, ...] = (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all)


def node() -> Any:
    world: Any = dist.group.WORLD
    return world.group.node


def peer() -> Any:
    return node().peers[1 - dist.get_rank()]


def streams() -> _Streams | None:
    found: _Streams | None = node()._lifecycle._messages.bulk_streams._streams.get(peer())
    return found


def open_streams() -> None:
    """Both ranks call this, and both have streams when it returns."""
    missing = torch.ones(1)
    while missing.item():
        dist.all_reduce(torch.ones(MIB))
        found = streams()
        missing.fill_(float(found is None or not found.in_use))
        dist.all_reduce(missing)


def is_under_way() -> bool:
    """Whether a large message has begun to arrive."""
    connection = peer().connection
    return connection is not None and bool(connection.arriving.open_messages)


def shut_a_stream_down() -> None:
    found = streams()
    if found is not None and found.readers:
        found.readers[0]._socket.shut_down()


def strike_in_the_middle(strike: Callable[[], object]) -> threading.Thread:
    def wait_and_strike() -> None:
        until(is_under_way)
        strike()

    thread = threading.Thread(target=wait_and_strike)
    thread.start()
    return thread


@in_processes(2)
def test_every_collective_is_right_when_a_stream_ends_in_the_middle(worker: Worker) -> None:
    with process_group(worker, options=options()):
        tensor = torch.empty(COUNT)
        for operation in OPERATIONS:
            open_streams()
            limit_connections(SLOW_BYTES)
            dist.barrier()
            thread = strike_in_the_middle(shut_a_stream_down) if worker.rank == 0 else None
            operation(worker.rank, tensor)
            if thread is not None:
                thread.join()
            operation(worker.rank, tensor)


def begin_and_report(worker: Worker, operation: Operation, seconds: float, speed: int) -> str:
    """Rank 0 reports "in the middle" of the operation; returns what it ends in."""
    with process_group(worker, options=options()):
        tensor = torch.empty(COUNT)
        open_streams()
        limit_connections(speed)
        dist.barrier()
        world: Any = dist.group.WORLD
        world.set_timeout(timedelta(seconds=seconds))
        if worker.rank == 0:
            strike_in_the_middle(lambda: worker.report("in the middle"))
        try:
            operation(worker.rank, tensor)
        except CollectiveError as error:
            ended = type(error).__name__
        else:
            ended = ""
        if worker.rank == 0:
            tensor.fill_(-1)
            worker.report("ended")
            worker.wait_for("look")
            assert (tensor == -1).all()
    return ended


def in_each_operation(*by_default: Operation) -> pytest.MarkDecorator:
    """All operations; those that are not named are nightly."""
    return pytest.mark.parametrize(
        "operation",
        [
            each if each in by_default else pytest.param(each, marks=pytest.mark.nightly)
            for each in OPERATIONS
        ],
        ids=lambda operation: operation.__name__,
    )


@in_each_operation(all_reduce, all_gather)
def test_a_tensor_is_the_caller_s_again_when_its_collective_is_out_of_time(
    run_workers: RunWorkers, operation: Operation
) -> None:
    """The other rank stands still in the middle, and goes on afterwards: nothing more is written."""
    workers = run_workers.start(begin_and_report, 2, args=(operation, 3.0, SLOWEST_BYTES))
    workers[0].wait_for("in the middle")
    workers[1].stop()
    workers[0].wait_for("ended")
    workers[1].resume()
    workers[0].tell("look")
    assert workers[0].result() != ""
