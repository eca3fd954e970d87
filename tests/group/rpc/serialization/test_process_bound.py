"""What means something in one process only is refused: shards of tensors, meshes, process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rpc
from rpc.errors import SerializationError
from rref import RemoteModule, RRef
from tests.support.serving import in_standing_group

OTHER = "worker1"


@dataclass
class Holder:
    value: Any


class Shouts(Exception):
    """Has an attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__("loud")
        self.value = value


def same(value: Any) -> Any:
    return value


def shout(value: Any) -> None:
    raise Shouts(value)


class HasShard:
    """Makes a DTensor where it lives."""

    def __init__(self) -> None:
        self.mesh = mesh_of_one()

    def shard(self) -> DTensor:
        return shard_in(self.mesh)

    def fail(self) -> None:
        raise Shouts(self.shard())


def mesh_of_one() -> DeviceMesh:
    c10d.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def end_group() -> None:
    c10d.destroy_process_group()


@contextmanager
def mesh_here() -> Iterator[DeviceMesh]:
    mesh = mesh_of_one()
    try:
        yield mesh
    finally:
        end_group()


def shard_in(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])


def inside(value: Any) -> list[Any]:
    """An object, and others that contain it."""
    return [value, [({"x": value},)], Holder(value)]


def fsdp_module(mesh: DeviceMesh) -> nn.Module:
    layer = nn.Linear(2, 2)
    fully_shard(layer, mesh=mesh)
    return layer


def sharded_tensor() -> Any:
    shard = LocalShard(torch.ones(2), ShardMetadata([0], [2], "rank:0/cpu"))
    return init_from_local_shards([shard], 2)


def fsdp1_parameters(use_orig_params: bool) -> list[Any]:
    """The parameter that a module is sharded as, or the parameters that it shows."""
    sharded = FullyShardedDataParallel(
        nn.Linear(2, 2), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    return list(sharded.parameters())


REFUSED: list[tuple[str, Callable[[DeviceMesh], list[Any]]]] = [
    (r"full_tensor\(\)", lambda mesh: inside(shard_in(mesh))),
    (r"full_tensor\(\)", lambda mesh: inside(nn.Parameter(shard_in(mesh)))),
    (r"full_tensor\(\)", lambda mesh: [fsdp_module(mesh), fsdp_module(mesh).state_dict()]),
    (r"full_tensor\(\)", lambda mesh: [torch.optim.SGD(fsdp_module(mesh).parameters())]),
    ("summon_full_params", lambda _: inside(fsdp1_parameters(False)[0])),
    ("summon_full_params", lambda _: inside(fsdp1_parameters(True)[1])),
    (r"gather\(\)", lambda _: inside(sharded_tensor())),
    ("init_device_mesh", inside),
    ("new_group", lambda _: inside(c10d.group.WORLD)),
    (r"work\.wait\(\)", lambda _: [c10d.all_reduce(torch.ones(1), async_op=True)]),
]


@in_standing_group()
def test_as_an_argument_it_is_refused_with_what_to_send_instead() -> None:
    with mesh_here() as mesh:
        for instead, make in REFUSED:
            for value in make(mesh):
                with pytest.raises(SerializationError, match=instead):
                    rpc.rpc_sync(OTHER, same, args=(value,))
        shard = shard_in(mesh)
        calls: list[Callable[[], Any]] = [
            lambda: rpc.rpc_async(OTHER, same, kwargs={"value": shard}).wait(),
            lambda: rpc.remote(OTHER, Holder, args=(shard,)).to_here(),
            lambda: RemoteModule(f"{OTHER}/cpu", nn.Identity).forward(shard),
            lambda: rpc.rpc_sync(OTHER, shout, args=(shard,)),
        ]
        for call in calls:
            with pytest.raises(SerializationError, match=r"to_local\(\)"):
                call()
        assert torch.equal(rpc.rpc_sync(OTHER, same, args=(shard.to_local(),)), torch.arange(4.0))


@in_standing_group()
def test_as_a_result_it_is_refused_with_what_to_send_instead() -> None:
    remote = rpc.remote(OTHER, HasShard)
    made = remote.remote().shard()
    for call in (
        remote.rpc_sync().shard,
        made.to_here,
        lambda: rpc.rpc_sync(OTHER, RRef.to_here, args=(made,)),
    ):
        with pytest.raises(SerializationError, match=r"full_tensor\(\)"):
            call()
    with pytest.raises(Shouts) as caught:
        remote.rpc_sync().fail()
    assert not isinstance(getattr(caught.value, "value", None), torch.Tensor)
    rpc.rpc_sync(OTHER, end_group)


@in_standing_group()
def test_the_result_of_a_collective_is_sent_once_it_is_there() -> None:
    with mesh_here() as mesh:
        pending = all_reduce(torch.ones(2), "sum", mesh)
        assert type(pending) is AsyncCollectiveTensor
        first, second = rpc.rpc_sync(OTHER, same, args=([pending, pending],))
        assert first is second
        assert type(first) is torch.Tensor
        assert torch.equal(first, torch.ones(2))
