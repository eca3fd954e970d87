"""A worker's values by id, and its programs by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from rpc.runtime import spans
from spmd.engine.program.program import MeshKey, Program
from spmd.engine.program.repetition import Repetition
from spmd.engine.program.step_messages import Answer, EngineStep, Failure
from spmd.engine.worker.accelerated import CommonGenerator
from spmd.engine.worker.interpreter import LinkedProgram
from spmd.engine.worker.local_calls import InstructionError

__all__ = ["LOST", "WorkerEngine", "copied"]

LOST: Final[Any] = object()
"""Placeholder for a value whose program has ended before it was made."""


@dataclass(eq=False)
class _Known:
    """A program that this worker has."""

    definition: Program
    linked: LinkedProgram | None = None
    repetition: Repetition = field(default_factory=Repetition)


class WorkerEngine:
    """One worker's values and programs. Called by one thread.

    Args:
        rank: number of the worker.
        meshes: makes the process groups of a mesh; all workers call it in the same order.
        device: device on which it computes; default: the CPU.
    """

    def __init__(
        self, rank: int, meshes: Callable[[MeshKey], Any], device: torch.device | None = None
    ) -> None:
        self.rank = rank
        self._device = device
        self._generator = None if device is None else CommonGenerator(device)
        self.values: dict[int, Tensor] = {}
        self._meshes = meshes
        self._programs: dict[int, _Known] = {}
        self._ended: Failure | None = None

    def seed(self, state: Tensor) -> None:
        """Set the state of the generator that is the same on all workers, to one of a CPU generator."""
        if self._generator is None:
            torch.set_rng_state(state)
        else:
            self._generator.set_state(state)

    def random_state(self) -> Tensor:
        """Return the state of that generator, on the CPU."""
        return torch.get_rng_state() if self._generator is None else self._generator.get_state().cpu()

    def run(self, step: EngineStep) -> Answer:
        """Do one step. Values that are no longer needed are freed first, so that their memory can be
        reused.
        """
        if self._device is None:
            return self._run(step)
        with torch.accelerator.device_index(self._device.index):
            return self._run(step)

    def _run(self, step: EngineStep) -> Answer:
        for number in step.freed:
            self.values.pop(number, None)
        for number in step.forget:
            self._programs.pop(number, None)
        for offset, part in enumerate(step.uploads):
            self.values[step.base + offset] = part if self._device is None else part.to(self._device)
        if step.definition is not None and step.program is not None:
            self._programs[step.program] = _Known(step.definition)
        failures = () if step.program is None else self._run_program(step, self._programs[step.program])
        values = tuple([self.values[number] for number in step.wanted])
        if any(each is LOST for each in values):
            values = ()
        if self._device is not None:
            values = tuple([each.cpu() for each in values])
        return Answer(values, failures)

    def relink(self) -> None:
        """Forget the process groups in all programs, since they are formed again, and run programs again."""
        self._ended = None
        for known in self._programs.values():
            known.linked = None

    def restore(self, values: Mapping[int, Tensor], random_state: Tensor) -> None:
        """Go back to an earlier state. The driver sends all programs again."""
        self._programs.clear()
        self.values.clear()
        self.values.update(copied(values, self._device))
        self.seed(random_state)

    def _link(self, definition: Program) -> LinkedProgram:
        if self._generator is None:
            return LinkedProgram(definition, self.rank, self._meshes)
        source = self._generator.source
        return LinkedProgram(definition, self.rank, self._meshes, source, self._device, self._generator)

    def _run_program(self, step: EngineStep, known: _Known) -> tuple[Failure, ...]:
        """Run a program. Its inputs that are not outputs are gone afterwards, whether it has failed or not.

        When a program has ended early, this worker takes part in nothing until there are new groups: the
        others may still wait in a collective for it, and would take its next one for that.
        """
        ids, scalars = known.repetition.unpack(step.base, step.run)
        definition = known.definition
        count = len(ids)
        kept = {index for index in definition.outputs if index < count}
        inputs = [
            self.values[number] if index in kept else self.values.pop(number)
            for index, number in enumerate(ids)
        ]
        made = len(definition.outputs) - len(kept)
        outputs: list[Any] = [LOST] * made
        failed: list[InstructionError] = []
        if self._ended is None:
            try:
                if known.linked is None:
                    known.linked = self._link(definition)
                with spans.span("SPMD program", program=step.program):
                    outputs = known.linked.run(inputs, scalars, failed)[len(kept) :]
            except InstructionError as error:
                self._ended = Failure(error.index, _sendable(error.cause))
            except Exception as error:  # it could not be linked
                self._ended = Failure(-1, _sendable(error))
        first = step.base + len(step.uploads)
        for offset, value in enumerate(outputs):
            self.values[first + offset] = value
        if self._ended is not None:
            return (self._ended,)
        return tuple([Failure(each.index, _sendable(each.cause), ends=False) for each in failed])


def copied(values: Mapping[int, Tensor], device: torch.device | None = None) -> dict[int, Tensor]:
    """Return copies of values, on a device; default: on the CPU."""
    place = device or "cpu"
    return {
        number: value if value is LOST else value.to(place, copy=True) for number, value in values.items()
    }


def _sendable(error: BaseException) -> Exception:
    """Return an error without frames, which would keep their variables alive."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
