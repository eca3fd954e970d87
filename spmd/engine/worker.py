"""A worker: values by id, programs by number, and one thread that does the driver's steps in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmd.engine.interpreter import InstructionError, LinkedProgram
from spmd.engine.program import MeshKey
from spmd.engine.steps import Answer, Failure, Step

__all__ = ["WorkerEngine"]

_LOST: Final[Any] = object()
"""In place of a value whose program has failed."""


class WorkerEngine:
    """One worker's values and programs. One thread calls it.

    Args:
        rank: the worker's number.
        meshes: makes the mesh of a key; all workers do so in the same order.
    """

    def __init__(self, rank: int, meshes: Callable[[MeshKey], DeviceMesh]) -> None:
        self.rank = rank
        self.values: dict[int, Tensor] = {}
        self._meshes = meshes
        self._programs: dict[int, LinkedProgram] = {}
        self._outputs: dict[int, int] = {}

    def run(self, step: Step) -> Answer:
        """Do one step."""
        for offset, part in enumerate(step.uploads):
            self.values[step.base + offset] = part
        failure = None if step.program is None else self._run_program(step, step.program)
        values = tuple(self.values[number] for number in step.wanted)
        for number in step.freed:
            self.values.pop(number, None)
        if any(each is _LOST for each in values):
            return Answer((), failure)
        return Answer(values, failure)

    def _run_program(self, step: Step, number: int) -> Failure | None:
        first = step.base + len(step.uploads)
        failure = None
        try:
            if step.definition is not None:
                self._outputs[number] = len(step.definition.outputs)
                self._programs[number] = LinkedProgram(step.definition, self.rank, self._meshes)
            inputs = [self.values[each] for each in step.inputs]
            if any(each is _LOST for each in inputs):
                outputs = [_LOST] * self._outputs[number]
            else:
                outputs = self._programs[number].run(inputs, step.scalars)
        except InstructionError as error:
            failure = Failure(error.index, error.cause)
        except Exception as error:  # it could not be linked
            failure = Failure(-1, error)
        if failure is not None:
            outputs = [_LOST] * self._outputs[number]
        for offset, value in enumerate(outputs):
            self.values[first + offset] = value
        return failure
