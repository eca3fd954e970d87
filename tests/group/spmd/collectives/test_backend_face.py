"""What parts of PyTorch ask of a group's backend, and groups of other backends beside ours."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.support.default_device import not_on_devices
from tests.support.process_groups import process_group
from tests.support.serving import in_processes
from tests.support.workers import RunWorkers, Worker

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", ["farcall", "gloo"])


def facts(worker: Worker, backend: str) -> dict[str, Any]:
    """What both backends answer in the same way."""
    with process_group(worker, backend=backend) as group, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine: Any = group._get_backend(CPU)
        distributed_c10d._set_pg_timeout(timedelta(seconds=77))
        with pytest.raises(RuntimeError, match="No backend type associated with device type meta"):
            group._get_backend(torch.device("meta"))
        dist.all_reduce(torch.ones(1))
        return {
            "rank": (mine.rank(), mine.size()),
            "device": distributed_c10d._get_pg_default_device(group),
            "on the cpu": "cpu" in distributed_c10d._device_capability(group),
            "timeout": mine.options._timeout,
            "splits": mine.supports_splitting,
            "coalesces": mine.supports_coalescing,
            "shrinks": mine.supports_shrinking,
            "allocates": mine.supports_tensor_alloc(CPU),
            "number": group._get_sequence_number_for_group(),
            "store": type(group.get_group_store()),
        }


def test_it_answers_as_gloo_does(run_workers: RunWorkers) -> None:
    found = {}
    for backend in ("farcall", "gloo"):
        found[backend] = run_workers(partial(facts, backend=backend), 2)
        assert found[backend][0]["timeout"] == timedelta(seconds=77)
    assert found["farcall"] == found["gloo"]


@not_on_devices("a group has a backend for each type of device")
@in_processes(1)
def test_it_has_the_name_of_its_group(worker: Worker) -> None:
    with process_group(worker) as group:
        assert group._get_backend(CPU).name() == "farcall"
        assert dist.get_backend(group) == "farcall"


# ---- groups beside it


def mix(worker: Worker, backend: str) -> None:
    other = {"farcall": "gloo", "gloo": "farcall"}[backend]
    with process_group(worker, backend=backend):
        part = dist.new_group(backend=other)
        for group, name in ((part, other), (dist.group.WORLD, backend)):
            x = torch.tensor([worker.rank + 1.0])
            dist.all_reduce(x, group=group)
            assert x.item() == 3
            objects = [None, None]
            dist.all_gather_object(objects, worker.rank, group=group)
            assert objects == [0, 1]
            assert dist.get_backend(group) == name
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), backend_override={"dp": other})
        assert dist.get_backend(mesh.get_group("dp")) == other
        assert dist.get_backend(mesh.get_group("tp")) == backend
        x = torch.ones(3)
        dist.all_reduce(x, group=mesh.get_group("dp"))
        assert x.eq(2).all()


@not_on_devices("gloo has no tensors on devices")
@BACKENDS
def test_groups_of_another_backend_work_beside_it(run_workers: RunWorkers, backend: str) -> None:
    run_workers(partial(mix, backend=backend), 2)


# ---- split groups


def split(worker: Worker) -> None:
    rank = worker.rank
    with process_group(worker, seconds=30) as world:
        part = dist.split_group(split_ranks=[[0, 2], [3, 1]], group_desc="half", timeout=timedelta(seconds=9))
        assert part is not None
        ranks = dist.get_process_group_ranks(part)
        assert ranks == ([0, 2] if rank in (0, 2) else [3, 1])
        assert dist.get_rank(part) == ranks.index(rank)
        assert (part.group_desc, dist.get_backend(part)) == ("half", "farcall")
        assert part._get_backend(CPU).options._timeout == timedelta(seconds=9)
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=part)
        assert x.item() == sum(ranks)
        quarter: object = dist.split_group(parent_pg=part, split_ranks=[[1]])
        assert (quarter is dist.GroupMember.NON_GROUP_MEMBER) == (ranks[1] != rank)
        dist.all_reduce(x, group=world)
        assert x.item() == 12


@pytest.mark.skipif(torch.__version__ < "2.15", reason="older versions split groups on accelerators only")
def test_a_group_is_split(run_workers: RunWorkers) -> None:
    run_workers(split, 4)
