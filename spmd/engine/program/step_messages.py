"""Messages between the driver and a worker: one step for each flush, answered when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spmd.engine.program.program import Program

__all__ = ["Answer", "EngineStep", "Failure"]


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step for a worker. Values have ids: from ``base`` on first those of uploads, then of the values that
    the program makes.

    Attributes:
        sequence: number of the step, from 0; steps are done in this order.
        base: the first id.
        uploads: this worker's shards of new tensors.
        program: number of the program; None: nothing is run.
        definition: the program, if it is sent for the first time.
        run: the ids of its inputs, and its scalars, as ``Repetition`` packs them.
        freed: ids of values that are no longer needed, not even by this step; inputs that the program uses up
            are not listed.
        wanted: ids of values that the answer must contain.
        forget: numbers of programs that neither this step nor a later one runs.
    """

    sequence: int
    base: int
    uploads: tuple[Tensor, ...] = ()
    program: int | None = None
    definition: Program | None = None
    run: Any = None
    freed: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()

    def __reduce__(self) -> Any:
        return EngineStep, (
            self.sequence,
            self.base,
            self.uploads,
            self.program,
            self.definition,
            self.run,
            self.freed,
            self.wanted,
            self.forget,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """An instruction that has failed.

    Attributes:
        index: its number in the program; -1: the program could not be run at all.
        cause: the error that it raised.
        ends: whether none of the program's results exist; otherwise only those that depend on the instruction
            are lost, and replaced by zeros.
    """

    index: int
    cause: Exception
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer when a step is done: local tensors that were requested, or errors."""

    values: tuple[Tensor, ...] = ()
    failures: tuple[Failure, ...] = ()
