"""The worker's side of the driver's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rref import RRef
from spmd.engine.errors import SpmdError
from spmd.engine.program.program import MeshKey
from spmd.engine.program.redistribution import Groups
from spmd.engine.program.step_messages import Answer, EngineStep, from_message
from spmd.engine.worker.accelerated import device_of_worker
from spmd.engine.worker.default_group import DefaultGroup
from spmd.engine.worker.saves import Saved, Saves
from spmd.engine.worker.separate_groups import SeparateGroups
from spmd.engine.worker.worker_engine import WorkerEngine
from spmd.workers.members import await_members
from spmd.workers.step_queue import StepQueue

__all__ = ["ServedWorker", "WorkerGroups", "make"]


_JOINING_SECONDS: Final = 5.0
"""Maximum time in seconds after the driver in which a worker gets to know one that has joined."""


class WorkerGroups(Protocol):
    """The process groups of one rank. Except ``abort``, one call at a time."""

    def form(self, generation: int, workers: Sequence[str] | None = None) -> None:
        """Make the workers a group, together with the others; again, after ``destroy``, with another number,
        and with other names where workers were replaced.

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
    driver: str,
    workers: Sequence[str],
    rank: int,
    name: str,
    device: str | None = None,
    generation: int = 0,
    first: int = 0,
) -> RRef[ServedWorker]:
    """Become a worker. Called remotely, on all workers at the same time, or in the place of a lost one.

    Args:
        driver: name of the caller; the worker ends when it is lost.
        workers: names of all workers, by number.
        rank: number of this worker.
        name: name of the session.
        device: device on which to compute; default: the CPU.
        generation: number of the process groups that it forms with the others.
        first: number of the first step that it gets.
    """
    await_members(workers, _JOINING_SECONDS)
    return RRef(ServedWorker(driver, workers, rank, name, device, generation, first))


class ServedWorker:
    """A worker's engine behind calls, which may arrive out of order."""

    def __init__(
        self,
        driver: str,
        workers: Sequence[str],
        rank: int,
        name: str,
        device: str | None = None,
        generation: int = 0,
        first: int = 0,
    ) -> None:
        self._device: torch.device | None = None
        if device is not None:
            agent: Any = current_agent()
            hosts = [agent.group.peers.find(each).member.host for each in workers]
            self._device = device_of_worker(device, hosts, rank, workers[rank])
        kind = DefaultGroup if len(set(workers)) == len(workers) else SeparateGroups
        self._driver = current_agent().group.peers.find(driver)
        self._workers = workers
        self._groups: WorkerGroups = kind(driver, workers, rank, name, self._device)
        self._groups.form(generation)
        self._engine = WorkerEngine(rank, self._groups.of_mesh, self._device)
        self._saves = Saves(self._engine)
        release = self._engine.values.clear
        self._steps = StepQueue(self._run, driver, self.abort, _ended, release, first)

    def _run(self, step: EngineStep) -> Answer:
        answer = self._engine.run(step)
        if step.save is not None:
            try:
                self._saves.save(step.save)
            except Exception as error:  # no memory, for example
                self._saves.fail(step.save.number, error)
                raise
        return answer

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

    def regroup(self, generation: int, workers: Sequence[str] | None = None) -> None:
        """Form all process groups again, together with the others. No step is in progress.

        Args:
            workers: names of all workers, if some were replaced.
        """
        self._groups.destroy()
        self._engine.relink()
        if workers is not None:
            await_members(set(workers).difference(self._workers), _JOINING_SECONDS)
            self._workers = workers
        self._groups.form(generation, workers)

    # ---- copies, see ``saves``

    def next_to(self, neighbour: Any) -> None:
        """Set the reference to the worker that keeps this one's shards."""
        self._saves.next_to(neighbour)

    def keep(self, number: int, sharded: tuple[int, ...], new: dict[int, torch.Tensor]) -> None:
        """Keep another worker's shards."""
        self._saves.keep(number, sharded, new)

    @async_execution
    def saved(self, number: int) -> Any:
        """Return when this worker and its neighbour have a save."""
        return self._saves.done(number)

    def complete(self, number: int) -> None:
        """Forget the saves before one that all workers have."""
        self._saves.complete(number)

    def of_neighbour(self, number: int) -> Saved:
        """Return the values of the worker whose shards are kept here."""
        return self._saves.of_neighbour(number)

    def restore(self, number: int) -> None:
        """Go back to a save. No step is in progress."""
        self._saves.restore(number)

    def take_over(self, number: int, neighbour: Any) -> None:
        """Take the place of a lost worker, whose shards the neighbour has."""
        self._saves.take_over(number, neighbour.rpc_sync(timeout=0).of_neighbour(number))

    @async_execution
    def send_again(self, number: int) -> Any:
        """Send all shards of a save to the neighbour; returns when it has them."""
        return self._saves.send_again(number)

    def close(self) -> None:
        """End: values are freed, and the process groups are destroyed."""
        self._steps.close()
        self._saves.close()
        self._groups.destroy()


def _ended() -> SpmdError:
    return SpmdError("the worker has left SPMD mode")
