"""Collectives of ranks on two hosts: shared memory within each, messages between them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import rpc
from spmd.collectives.between_hosts.hierarchy import HierarchicalCollectives
from spmd.collectives.errors import RankLostError
from tests.support.network_namespaces import Hosts, enter, hosts
from tests.support.process_groups import process_group
from tests.support.workers import RunWorkers, Worker

__all__ = ["hosts"]

SIZES = (1, 1000, 300_000)


def on_host(worker: Worker, names: list[str], addresses: list[str]) -> rpc.AgentOptions:
    """Ranks 0 and 3 are on the first host, the others on the second."""
    host = int(worker.rank in (1, 2))
    enter(names[host])
    return rpc.AgentOptions(listen=addresses[host])


def all_operations(worker: Worker, names: list[str], addresses: list[str]) -> None:
    rank, count = worker.rank, worker.world_size
    with process_group(worker, options=on_host(worker, names, addresses)) as world:
        assert isinstance(world.group.algorithms, HierarchicalCollectives)
        for size in SIZES:
            tensor = torch.arange(float(size)) * (rank + 1)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(float(size)) * 10)
            for root in range(count):
                tensor = torch.full((size,), float(rank))
                dist.broadcast(tensor, root)
                assert tensor.eq(root).all()
                tensor = torch.full((size,), float(rank + 1))
                dist.reduce(tensor, root, dist.ReduceOp.PRODUCT)
                assert tensor.eq(24 if rank == root else rank + 1).all()
            outputs = [torch.empty(size) for _ in range(count)]
            dist.all_gather(outputs, torch.full((size,), float(rank)))
            assert [each[0].item() for each in outputs] == [0, 1, 2, 3]
            inputs = [torch.full((size,), float(10 * rank + other)) for other in range(count)]
            dist.all_to_all(outputs, inputs)
            assert [each[-1].item() for each in outputs] == [10 * other + rank for other in range(count)]
            output = torch.empty(size)
            dist.reduce_scatter(output, inputs)
            assert output.eq(60 + 4 * rank).all()
        dist.barrier()


def test_all_operations_are_right_across_hosts(run_workers: RunWorkers, hosts: Hosts) -> None:
    run_workers(all_operations, 4, args=(hosts.names, hosts.addresses))


def reduce_for_ever(worker: Worker, names: list[str], addresses: list[str]) -> str:
    with process_group(worker, options=on_host(worker, names, addresses)):
        try:
            while True:
                dist.all_reduce(torch.ones(300_000))
                worker.report("reduced")
        except RankLostError as error:
            return str(error)


def test_a_rank_that_dies_on_one_host_ends_the_collective_on_both(
    run_workers: RunWorkers, hosts: Hosts
) -> None:
    workers = run_workers.start(reduce_for_ever, 4, args=(hosts.names, hosts.addresses))
    workers.wait_for("reduced")
    workers[2].kill()
    for rank in (0, 1, 3):
        assert "rank 2 (worker 'rank2') is gone" in workers[rank].result()
