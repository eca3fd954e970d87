"""``spmd.init_process_group``: the RPC group's workers become PyTorch's default process group."""

from __future__ import annotations

import gc
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rpc
import spmd
from rpc.errors import BlockingCallError, GroupMismatchError, RendezvousTimeoutError
from rpc.runtime.current import current_agent
from spmd.collectives.errors import CollectiveError
from spmd.collectives.one_host.local import LocalCollectives
from tests.support.default_device import TYPE
from tests.support.serving import in_all, in_group, in_processes
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker


@in_all(3)
def test_worker_i_is_rank_i(worker: Worker) -> None:
    spmd.init_process_group()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (worker.rank, 3, "farcall")
    tensor = torch.tensor(worker.rank)
    dist.all_reduce(tensor)
    assert tensor.item() == 3
    world: Any = dist.group.WORLD
    assert isinstance(world.group.algorithms, LocalCollectives)  # they share memory
    dist.destroy_process_group()


@in_all(2)
def test_calls_and_collectives_go_side_by_side_in_one_group_after_the_other(worker: Worker) -> None:
    other = f"worker{1 - worker.rank}"
    for _ in range(3):
        spmd.init_process_group()
        for step in range(7):
            future = rpc.rpc_async(other, torch.add, args=(torch.ones(1000), step))
            tensor = torch.full((1000,), float(step))
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((1000,), 2.0 * step))
            assert torch.equal(future.wait(), torch.ones(1000) + step)
        dist.destroy_process_group()


def objects_of_ours() -> Counter[str]:
    """How many objects there are of each class of collectives, and of bulk messages."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        each.__qualname__ for each in kinds if str(each.__module__).startswith(("rpc.bulk.", "spmd."))
    )


def begin_and_end() -> None:
    spmd.init_process_group()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert tensor[-1] == 2
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("count", "shared_memory_bytes"), [(100, 0), (10, 1 << 20)], ids=["messages", "shared memory"]
)
def test_groups_that_have_ended_leave_nothing_behind(
    run_workers: RunWorkers, count: int, shared_memory_bytes: int
) -> None:
    def task(worker: Worker) -> None:
        begin_and_end()
        before = objects_of_ours()
        for _ in range(count):
            begin_and_end()
        begin_and_end()
        until(lambda: current_agent().messages.bulk.tags == 0)
        until(lambda: objects_of_ours() <= before)

    run_workers(in_group(task, shared_memory_bytes=shared_memory_bytes), 2)


@in_all(4)
def test_sub_groups_and_meshes_are_made_of_it(worker: Worker) -> None:
    spmd.init_process_group()
    mesh = init_device_mesh(TYPE, (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = torch.tensor(float(worker.rank))
    dist.all_reduce(tensor, group=mesh["tp"].get_group())
    assert tensor.item() == (1.0 if worker.rank < 2 else 5.0)
    dist.destroy_process_group()


@in_all(2)
def test_without_a_timeout_it_is_formed_all_the_same(worker: Worker) -> None:
    spmd.init_process_group(timedelta(0))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    dist.destroy_process_group()


async def form_in_a_coroutine() -> None:
    spmd.init_process_group()


@in_all(1)
def test_a_coroutine_may_not_form_one(worker: Worker) -> None:
    with pytest.raises(BlockingCallError, match="inside an async def callee"):
        rpc.rpc_sync("worker0", form_in_a_coroutine)


@pytest.mark.parametrize("rank", [0, 1])
@in_all(2)
def test_all_can_leave_after_one_has_waited_in_vain(worker: Worker, rank: int) -> None:
    if worker.rank == rank:
        with pytest.raises(RendezvousTimeoutError, match=f"missing: {1 - rank}"):
            spmd.init_process_group(timedelta(milliseconds=300))


@in_processes(1)
def test_without_an_rpc_group_it_says_so(worker: Worker) -> None:
    with pytest.raises(rpc.errors.NotInitializedError, match="init_rpc"):
        spmd.init_process_group()


@in_processes(1)
def test_a_dynamic_group_is_refused(worker: Worker) -> None:
    with worker.group(dynamic=True), pytest.raises(GroupMismatchError, match="world_size"):
        spmd.init_process_group()


@in_processes(2)
def test_a_group_outlives_its_agent_only_to_say_so(worker: Worker) -> None:
    options = rpc.AgentOptions(init_method=worker.init_method)
    rpc.init_rpc(worker.name, rank=worker.rank, world_size=2, rpc_backend_options=options)
    spmd.init_process_group()
    rpc.shutdown()
    with pytest.raises(CollectiveError, match="agent has ended"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
