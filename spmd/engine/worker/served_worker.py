"""The worker's side of the driver's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rref import RRef
from spmd.engine.errors import SpmdError
from spmd.engine.program.program import MeshKey
from spmd.engine.program.redistribution import Groups
from spmd.engine.program.step_messages import EngineStep, from_message
from spmd.engine.worker.accelerated import device_of_worker
from spmd.engine.worker.default_group import DefaultGroup
from spmd.engine.worker.separate_groups import SeparateGroups
from spmd.engine.worker.worker_engine import WorkerEngine
from spmd.workers.step_queue import StepQueue

__all__ = ["ServedWorker", "WorkerGroups", "make"]


class WorkerGroups(Protocol):
    """The process groups of one rank. Except ``abort``, one call at a time."""

    def form(self, generation: int) -> None:
        """Make the workers a group, together with the others; again, after ``destroy``, with another number.

        Raises:
            StoreGivenUpError: a worker is lost, or forming it was given up, here or on another worker.
        """
        ...

    def of_mesh(self, key: MeshKey) -> Groups:
        """Return the process groups of a mesh. All workers call this in the same order."""
        ...

    def abort(self, reason: str) -> None:
        """End the collectives in progress, and the forming of a group, here and on the others. From any
        thread.
        """
        ...

    def destroy(self) -> None:
        """Leave all groups. Idempotent."""
        ...


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
        self._device: torch.device | None = None
        if device is not None:
            agent: Any = current_agent()
            hosts = [agent.group.peers.find(each).member.host for each in workers]
            self._device = device_of_worker(device, hosts, rank, workers[rank])
        kind = DefaultGroup if len(set(workers)) == len(workers) else SeparateGroups
        self._driver = current_agent().group.peers.find(driver)
        self._groups: WorkerGroups = kind(driver, workers, rank, name, self._device)
        self._groups.form(0)
        self._engine = WorkerEngine(rank, self._groups.of_mesh, self._device)
        self._steps = StepQueue(self._engine.run, driver, self.abort, _ended, self._engine.values.clear)

    def seed(self, state: torch.Tensor) -> None:
        """Set the state of the generator that is the same on all workers."""
        self._engine.seed(state)

    @async_execution
    def do(self, common: bytes | EngineStep, wanted: tuple[int, ...], *uploads: torch.Tensor) -> Any:
        """Do a step when the earlier ones are done; see ``EngineStep.message``."""
        return self._steps.put(from_message(common, wanted, uploads, self._driver))

    def skip(self, number: int) -> None:
        """Do not wait for a step, which the driver could not send."""
        self._steps.skip(number)

    def abort(self, reason: str) -> None:
        """End the collectives in progress, and the forming of a group, here and on the others."""
        self._groups.abort(reason)

    def regroup(self, generation: int) -> None:
        """Form all process groups again, together with the others. No step is in progress."""
        self._groups.destroy()
        self._engine.relink()
        self._groups.form(generation)

    def close(self) -> None:
        """End: values are freed, and the process groups are destroyed."""
        self._steps.close()
        self._groups.destroy()


def _ended() -> SpmdError:
    return SpmdError("the worker has left SPMD mode")
