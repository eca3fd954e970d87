"""A driver whose workers are simulated: one of them computes, and its collectives only count what they send.

So a test sees what one worker of many computes, holds and sends, in one process. Numbers are not those of a
program, since nobody else computes: it is of use to tests that count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from spmd.engine.driver import start
from spmd.engine.driver.current import set_engine
from spmd.engine.driver.device import set_up
from spmd.engine.driver.logical_tensor import LogicalTensor
from spmd.engine.driver.session import Session
from spmd.engine.program.program import MeshKey
from spmd.engine.program.step_messages import Answer, EngineStep
from spmd.engine.worker.worker_engine import WorkerEngine
from tests.support.spmd_session import InlinePort

__all__ = ["Group", "SimulatedWorker", "peak_memory", "simulated_session"]


class _Done:
    def wait(self) -> None:
        pass


class Group:
    """A process group of one, which stands for a larger one.

    Attributes:
        sent: bytes by operation, as the best schedule of each sends them.
    """

    def __init__(self, size: int, sent: Counter[str]) -> None:
        self._size, self.sent = size, sent

    def size(self) -> int:
        """How many workers it stands for."""
        return self._size

    def _count(self, name: str, bytes_sent: float) -> _Done:
        self.sent[name] += int(bytes_sent)
        return _Done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:
        """Leaves them as they are."""
        (tensor,) = tensors
        return self._count("allreduce", 2 * (self._size - 1) / self._size * tensor.nbytes)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> _Done:
        """Everybody has zeros."""
        for each in outputs[0]:
            each.zero_()
        return self._count("allgather", (self._size - 1) * inputs[0].nbytes)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> _Done:
        """The sum is zero."""
        outputs[0].zero_()
        return self._count("reduce_scatter", sum(each.nbytes for each in inputs[0]) - outputs[0].nbytes)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> _Done:
        """Everybody gives zeros."""
        for each in outputs:
            each.zero_()
        return self._count("alltoall", sum(each.nbytes for each in inputs[1:]))


class SimulatedWorker(InlinePort):
    """One of many workers.

    Attributes:
        sent: bytes, by operation.
    """

    def __init__(self, *, computes: bool) -> None:
        super().__init__("simulated")
        self.sent: Counter[str] = Counter()
        self.engine = WorkerEngine(0, lambda key: _Mesh(key, self.sent))
        self._computes = computes

    def send(self, step: EngineStep) -> Any:
        """Do it at once, or nothing."""
        if self._computes:
            return super().send(step)
        self.steps.append(step)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(Answer())
        return future


class _Mesh:
    def __init__(self, key: MeshKey, sent: Counter[str]) -> None:
        self._key, self._sent = key, sent

    def get_group(self, mesh_dim: int) -> Group:
        return Group(self._key.shape[mesh_dim], self._sent)


@contextmanager
def simulated_session(
    workers: int, *, computes: bool = True
) -> Iterator[tuple[Session, list[SimulatedWorker]]]:
    """A session of so many workers behind the device ``spmd:0``, of which the first computes.

    Args:
        computes: False: that one does not, either.
    """
    set_up()
    ports = [SimulatedWorker(computes=computes and rank == 0) for rank in range(workers)]
    session = Session(ports, LogicalTensor)
    mode: Any = SimpleNamespace(session=session, ports=ports)
    state = torch.get_rng_state()
    set_engine(session)
    start._mode = mode
    try:
        yield session, ports
    finally:
        start._mode = None
        set_engine(None)
        torch.set_rng_state(state)


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes by which the memory of this process's tensors grows at most while a function runs."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiled:
        function()
    events: Any = profiled.profiler
    now = highest = 0
    for event in sorted(events.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return highest
