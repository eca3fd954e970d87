"""The worker's side of the driver's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rref import RRef
from spmd.collectives.vendors import vendors
from spmd.engine.errors import SpmdError
from spmd.engine.program.layouts import coordinates
from spmd.engine.program.program import MeshKey
from spmd.engine.program.step_messages import EngineStep
from spmd.engine.worker.accelerated import device_of_worker
from spmd.engine.worker.worker_engine import WorkerEngine
from spmd.torch_internals import world
from spmd.workers.forming import Forming
from spmd.workers.step_queue import StepQueue

__all__ = ["ServedWorker", "make"]


def make(
    driver: str, workers: Sequence[str], rank: int, name: str, device: str | None = None
) -> RRef[ServedWorker]:
    """Become a worker. Called remotely, on all workers at the same time.

    Args:
        driver: name of the caller; the worker ends when it is lost.
        workers: names of all workers, by number.
        rank: number of this worker.
        name: name of the session.
        device: device on which to compute; default: the CPU.
    """
    return RRef(ServedWorker(driver, workers, rank, name, device))


class ServedWorker:
    """A worker's engine behind calls, which may arrive out of order."""

    def __init__(
        self,
        driver: str,
        workers: Sequence[str],
        rank: int,
        name: str,
        device: str | None = None,
    ) -> None:
        if dist.is_initialized():
            raise SpmdError(
                f"worker '{workers[rank]}' has a default process group already, and SPMD mode makes its "
                "workers one: call torch.distributed.destroy_process_group() there first"
            )
        self._driver, self._workers, self._rank, self._name = driver, workers, rank, name
        self._device = None if device is None else device_of_worker(device, rank, workers[rank])
        self._meshes: dict[MeshKey, _Mesh] = {}
        self._forming: Forming | None = None
        self._group(0)
        self._engine = WorkerEngine(rank, self._mesh, self._device)
        self._steps = StepQueue(self._engine.run, driver, self.abort, _ended, self._engine.values.clear)

    def _group(self, generation: int) -> None:
        """Make the workers the default process group."""
        self._forming = Forming(self._workers, f"{self._name}/{generation}")
        found = place = None
        if self._device is not None:  # backends of vendors want a device for each rank
            found, place = vendors(), f"{current_agent().group.peers.view.me.host} {self._device}"
        self._forming.form(self._rank, self._driver, vendors=found, place=place)
        self._forming = None

    def _mesh(self, key: MeshKey) -> _Mesh:
        found = self._meshes.get(key)
        if found is None:
            found = self._meshes[key] = _Mesh(key, self._rank)
        return found

    def seed(self, state: torch.Tensor) -> None:
        """Set the state of the generator that is the same on all workers."""
        self._engine.seed(state)

    @async_execution
    def do(self, step: EngineStep) -> Any:
        """Do a step when the earlier ones are done."""
        return self._steps.put(step)

    def abort(self, reason: str) -> None:
        """End the collectives in progress, and the forming of a group, here and on the others."""
        forming = self._forming
        if forming is not None:
            forming.give_up(reason)
        for group in list(world.pg_map):
            group.abort()

    def regroup(self, generation: int) -> None:
        """Form all process groups again, together with the others. No step is in progress."""
        dist.destroy_process_group()
        self._meshes.clear()
        self._engine.relink()
        self._group(generation)

    def close(self) -> None:
        """End: values are freed, and the process group is destroyed."""
        self._steps.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _ended() -> SpmdError:
    return SpmdError("the worker has left SPMD mode")


class _Mesh:
    """The process groups of a mesh, in which a worker's rank is its position along the axis."""

    def __init__(self, key: MeshKey, rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor(key.devices, device="cpu").reshape(key.shape))
        at = coordinates(key, rank)
        self._groups: list[Any] = []
        for axis in range(len(key.shape)):
            others = (*at[:axis], *at[axis + 1 :])
            line = []
            for each in key.devices:
                place = coordinates(key, each)
                if (*place[:axis], *place[axis + 1 :]) == others:
                    line.append(each)
            group = mesh.get_group(axis)
            places = [line.index(each) for each in dist.get_process_group_ranks(group)]
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
