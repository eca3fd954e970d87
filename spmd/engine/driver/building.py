"""From a recording to a program: what is not used is left out, and values get numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.engine.driver.recorder import Entry
from spmd.engine.program.metas import Spec
from spmd.engine.program.program import Instruction, Meta, Program, Ref, Scalar

__all__ = ["build"]


def build(
    inputs: Sequence[Spec],
    kept_inputs: Sequence[int],
    operations: Sequence[tuple[Entry, tuple[int, ...]]],
    outputs: Sequence[int],
    default_dtype: torch.dtype = torch.float32,
) -> tuple[Program, list[int]]:
    """Return the program of a recording, without unused results.

    Args:
        kept_inputs: inputs that are needed afterwards: they are the program's first outputs.
        outputs: numbers of the results that are outputs.

    Returns:
        The program, and for each of its instructions, the index of its operation.
    """
    starts: list[int] = []
    count = 0
    for entry, _ in operations:
        starts.append(count)
        count += len(entry.specs)
    used = set(outputs)
    kept: list[int] = []
    for number in reversed(range(len(operations))):
        entry, refs = operations[number]
        if entry.effect or any(starts[number] + offset in used for offset in range(len(entry.specs))):
            kept.append(number)
            used.update(refs)
    kept.reverse()
    first_scalars: list[int] = []
    scalars = 0
    for entry, _ in operations:
        first_scalars.append(scalars)
        scalars += _count_scalars((entry.args, entry.kwargs))
    numbers = {-1 - index: index for index in range(len(inputs))}
    instructions: list[Instruction] = []
    following = len(inputs)
    for number in kept:
        entry, refs = operations[number]
        values = tuple(numbers[each] for each in refs)
        args: Any = _filled(entry.args, values, first_scalars[number])
        kwargs: Any = _filled(entry.kwargs, values, first_scalars[number])
        results: list[Meta | None] = []
        for result, spec in enumerate(entry.specs, start=starts[number]):
            results.append(spec.meta if spec is not None and result in used else None)
            numbers[result] = following
            following += 1
        instructions.append(Instruction(entry.operator, args, kwargs, tuple(results)))
    every = (*kept_inputs, *[numbers[each] for each in outputs])
    metas = tuple([spec.meta for spec in inputs])
    return Program(metas, tuple(instructions), every, default_dtype), kept


def _filled(tree: Any, values: tuple[int, ...], first_scalar: int) -> Any:
    """Return an operation's arguments, with numbers of the program in place of its own."""
    if isinstance(tree, Ref):
        return Ref(values[tree.index])
    if isinstance(tree, Scalar):
        return Scalar(first_scalar + tree.index)
    if isinstance(tree, tuple):
        return tuple([_filled(each, values, first_scalar) for each in tree])
    return tree


def _count_scalars(tree: Any) -> int:
    if isinstance(tree, Scalar):
        return 1
    return sum(_count_scalars(each) for each in tree) if isinstance(tree, tuple) else 0
