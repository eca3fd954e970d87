"""Collectives on tensors and in places that are not the usual ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from spmd.collectives.errors import CollectiveTimeoutError
from tests.support.process_groups import by_messages, process_group
from tests.support.serving import in_processes
from tests.support.workers import Worker

PATHS = pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def world(worker: Worker, apart: bool) -> Any:
    return process_group(worker, options=by_messages() if apart else None)


@PATHS
@in_processes(2)
def test_a_leaf_that_requires_gradients_can_be_reduced(worker: Worker, apart: bool) -> None:
    leaf = torch.full((5,), float(worker.rank + 1), requires_grad=True)
    with world(worker, apart):
        for is_async in (False, True):
            work = dist.all_reduce(leaf, async_op=is_async)
            if work is not None:
                work.wait()
        dist.broadcast(leaf, 0)
        gathered = [torch.empty(5) for _ in range(2)]
        dist.all_gather(gathered, leaf)
        dist.barrier()
    assert leaf.tolist() == [6.0] * 5
    assert leaf.requires_grad
    assert not any(each.requires_grad for each in gathered)


@PATHS
@in_processes(2)
def test_tensors_of_inference_mode_can_be_reduced_on_any_thread(worker: Worker, apart: bool) -> None:
    with torch.inference_mode():
        tensors = [torch.full((5, 2), float(worker.rank + 1)) for _ in range(4)]
    with world(worker, apart):
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1].t())
        wait(dist.all_reduce(tensors[2], async_op=True))
        other = 1 - worker.rank
        works = [dist.isend(tensors[0], other), dist.irecv(tensors[3].t(), other)]
        wait(*works)
        dist.barrier()
    assert [each.tolist() for each in tensors] == [[[3.0] * 2] * 5] * 4


@PATHS
@in_processes(2)
def test_results_can_be_used_in_autograd(worker: Worker, apart: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    dense = torch.tensor([[1.0, 0, 2]])
    with world(worker, apart):
        tensor, sparse = torch.ones(3), dense.to_sparse()
        dist.all_reduce(tensor)
        dist.all_reduce(sparse)
        dist.barrier()
    assert not sparse.coalesce().values().is_inference()
    loss = (weight * tensor).sum() + (sparse.to_dense() * weight).sum()
    [gradient] = torch.autograd.grad(loss, [weight])
    assert gradient.tolist() == [4.0, 2.0, 6.0]


@PATHS
@in_processes(2)
def test_the_profiler_shows_each_operation_once(worker: Worker, apart: bool) -> None:
    tensor, other = torch.ones(3, 4), 1 - worker.rank
    with world(worker, apart):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            dist.all_reduce(tensor)
            wait(dist.broadcast(tensor, 0, async_op=True))
            works = [dist.isend(tensor, other), dist.irecv(torch.empty(3, 4), other)]
            wait(*works)
        dist.barrier()
    found = {event.name: event for event in profiler.events() if event.name.startswith("farcall:")}
    assert set(found) == {f"farcall:{name}" for name in ("all_reduce", "broadcast", "send", "recv")}
    assert all(event.input_shapes == [[3, 4]] for event in found.values())


@PATHS
@in_processes(4)
def test_monitored_barrier_names_who_has_not_come(worker: Worker, apart: bool) -> None:
    with world(worker, apart) as group:
        group.monitored_barrier()
        if worker.rank == 2:
            with pytest.raises(CollectiveTimeoutError):
                dist.recv(torch.empty(1), 0)  # until the group has failed
            return
        words = {
            0: r"^Rank 2 failed to pass monitoredBarrier: .* waiting for rank 2 \(",
            1: "^Rank 1 successfully reached monitoredBarrier, but received errors .* from rank 0",
            3: "^Rank 3 successfully reached monitoredBarrier, but received errors .* from rank 0",
        }
        with pytest.raises(CollectiveTimeoutError, match=words[worker.rank]):
            group.monitored_barrier(timedelta(seconds=0.5))
