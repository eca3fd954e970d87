"""The driver's records of the steps that it has sent, and the errors of those that have failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rpc.errors import GivenUpError, WorkerLostError
from spmd.collectives.errors import CollectiveError
from spmd.engine.driver.source_positions import Position, described
from spmd.engine.errors import OperationError
from spmd.engine.program.program import Meta, Program, Ref, Scalar
from spmd.engine.program.repetition import Repetition
from spmd.engine.program.step_messages import Answer

__all__ = ["Known", "UnderWay", "explained", "has_ended", "unanswered", "were_cut_off"]


@dataclass(eq=False)
class Known:
    """A program that the workers have.

    Attributes:
        number: its number; no other program of the session has it, or had it.
        kept: index of the recorded operation of each of its instructions.
        epoch: the session's epoch in which the workers got it; -1: they have not got it.
    """

    number: int
    program: Program
    kept: list[int]
    epoch: int = -1
    repetition: Repetition = field(default_factory=Repetition)


@dataclass(eq=False)
class UnderWay:
    """A step that the workers have not answered yet, and the data for its errors.

    Attributes:
        answers: futures, by worker.
        inputs: ids of the inputs.
        made: ids of the values that it makes.
        number: number of the step, from 0.
    """

    answers: list[Any]
    known: Known | None = None
    positions: list[Position] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    made: range = range(0)
    number: int = 0

    def described(self) -> str:
        """Return a description of the step, with the user's lines."""
        if not self.positions:
            return f"step {self.number}, {'to fetch a tensor' if self.inputs else 'to free or copy tensors'}"
        first, last = (described(self.positions[end]) for end in (0, -1))
        where = f"at {first}" if first == last else f"from {first} to {last}"
        return f"step {self.number}, {len(self.positions)} operations {where}"


def were_cut_off(answers: Iterable[Answer | None]) -> bool:
    """Whether workers have ended a program early, and all that did since others were missing."""
    ends = [each for answer in answers if answer is not None for each in answer.failures if each.ends]
    kinds = (CollectiveError, GivenUpError, WorkerLostError)
    return bool(ends) and all(isinstance(each.cause, kinds) for each in ends)


def has_ended(answer: Answer) -> bool:
    """Whether a worker has ended a program early, so that others may wait for it."""
    return any(each.ends for each in answer.failures)


def unanswered(asked: str, error: Exception) -> Exception:
    """Return an error that says what a lost worker did not answer; any other error as it is."""
    if not isinstance(error, WorkerLostError):
        return error
    return WorkerLostError(
        f"worker '{error.worker}' is gone: {error.reason}. It has not answered {asked}. What the workers "
        "hold is lost: end SPMD mode with spmd.shutdown(), begin it again, and go on from a checkpoint",
        error.worker,
        error.reason,
    )


def explained(step: UnderWay, index: int, cause: Exception) -> OperationError:
    """Return an error with the user's line."""
    if step.known is None or index < 0:
        error = OperationError(
            f"workers could not run a program: {type(cause).__name__}: {_first_line(cause)}"
        )
        error.__cause__ = cause
        return error
    where = described(step.positions[step.known.kept[index]])
    instruction = step.known.program.instructions[index]
    metas = _metas(step.known.program)
    given = ", ".join(_shown(each, metas) for each in instruction.args)
    operator, reason = instruction.operator, f"{type(cause).__name__}: {_first_line(cause)}"
    error = OperationError(f"{operator}({given}) has failed at {where}: {reason}", where, operator)
    error.__cause__ = cause
    return error


def _first_line(cause: Exception) -> str:
    return str(cause).strip().partition("\n")[0]


def _metas(program: Program) -> list[Meta | None]:
    found: list[Meta | None] = list(program.inputs)
    for each in program.instructions:
        found += each.results
    return found


def _shown(arg: Any, metas: list[Meta | None]) -> str:
    if isinstance(arg, Ref):
        meta = metas[arg.index]
        return "?" if meta is None else f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
    if isinstance(arg, Scalar):
        return "number"
    if isinstance(arg, tuple):
        return f"[{', '.join(_shown(each, metas) for each in arg)}]"
    return str(arg)
