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


def on_host(worker: Worker, names: list[str], addresses: list[str]) -> rpc.AgentOptions:
    """Ranks 0 and 3 are on the first host, the others on the second."""
    host = int(worker.rank in (1, 2))
    enter(names[host])
    return rpc.AgentOptions(listen=addresses[host])


def reduce_for_ever(worker: Worker, names: list[str], addresses: list[str]) -> str:
    with process_group(worker, options=on_host(worker, names, addresses)) as world:
        assert isinstance(world.group.algorithms, HierarchicalCollectives)
        try:
            while True:
                for size in (300_000, 1000, 1):
                    tensor = torch.arange(float(size)) * (worker.rank + 1)
                    dist.all_reduce(tensor)
                    assert torch.equal(tensor, torch.arange(float(size)) * 10)
                    tensor = torch.full((size,), float(worker.rank))
                    dist.broadcast(tensor, size % 4)
                    assert tensor.eq(size % 4).all()
                worker.report("reduced")
        except RankLostError as error:
            return str(error)


def test_ranks_of_two_hosts_reduce_until_one_dies_which_ends_the_collective_on_both(
    run_workers: RunWorkers, hosts: Hosts
) -> None:
    workers = run_workers.start(reduce_for_ever, 4, args=(hosts.names, hosts.addresses))
    workers.wait_for("reduced")
    workers[2].kill()
    for rank in (0, 1, 3):
        assert "rank 2 (worker 'rank2') is gone" in workers[rank].result()
