"""The process groups of workers that have one rank each, on c10d: all ranks are the default process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rpc.runtime.current import current_agent
from spmd.collectives.vendors import vendors
from spmd.engine.errors import SpmdError
from spmd.engine.program.layouts import line
from spmd.engine.program.program import MeshKey
from spmd.torch_internals import world
from spmd.workers.forming import Forming

__all__ = ["DefaultGroup"]


class DefaultGroup:
    """See ``WorkerGroups``. Tensors on devices go to the vendor's backend, if each rank has its own device.

    Raises:
        SpmdError: this worker has a default process group already.
    """

    def __init__(
        self, driver: str, workers: Sequence[str], rank: int, name: str, device: torch.device | None
    ) -> None:
        if dist.is_initialized():
            raise SpmdError(
                f"worker '{workers[rank]}' has a default process group already, and SPMD mode makes its "
                "workers one: call torch.distributed.destroy_process_group() there first"
            )
        self._driver, self._workers, self._rank, self._name = driver, workers, rank, name
        self._device = device
        self._meshes: dict[MeshKey, _Mesh] = {}
        self._forming: Forming | None = None

    def form(self, generation: int, workers: Sequence[str] | None = None) -> None:
        self._workers = workers or self._workers
        self._forming = Forming(self._workers, f"{self._name}/{generation}")
        found = place = None
        if self._device is not None:  # backends of vendors want a device for each rank
            found, place = vendors(), f"{current_agent().group.peers.view.me.host} {self._device}"
        self._forming.form(self._rank, self._driver, vendors=found, place=place)
        self._forming = None

    def of_mesh(self, key: MeshKey) -> _Mesh:
        found = self._meshes.get(key)
        if found is None:
            found = self._meshes[key] = _Mesh(key, self._rank)
        return found

    def abort(self, reason: str) -> None:
        forming = self._forming
        if forming is not None:
            forming.give_up(reason)
        for group in list(world.pg_map):
            group.abort()

    def destroy(self) -> None:
        self._meshes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Mesh:
    """The process groups of a mesh, in which a worker's rank is its position along the axis."""

    def __init__(self, key: MeshKey, rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor(key.devices, device="cpu").reshape(key.shape))
        self._groups: list[Any] = []
        for axis in range(len(key.shape)):
            ranks = line(key, axis, rank)
            group = mesh.get_group(axis)
            places = [ranks.index(each) for each in dist.get_process_group_ranks(group)]
            self._groups.append(group if places == sorted(places) else _Permuted(group, places))

    def get_group(self, mesh_dim: int) -> Any:
        return self._groups[mesh_dim]


class _Permuted:
    """A process group, whose ranks PyTorch has sorted, with workers in the order of their mesh."""

    def __init__(self, group: Any, places: Sequence[int]) -> None:
        self._group, self._places = group, places
        self.size, self.allreduce = group.size, group.allreduce

    def _sorted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[place] for place in self._places]

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._group.allgather([self._sorted(each) for each in outputs], inputs, options)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._group.reduce_scatter(outputs, [self._sorted(each) for each in inputs], options)

    def alltoall(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._group.alltoall(self._sorted(outputs), self._sorted(inputs), options)
