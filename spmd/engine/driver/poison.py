"""Marks the values that depend on a failed instruction, and no others.

A worker replaces the results of a failed instruction by zeros, and continues, so that all workers still take
part in every collective, also if the instruction has failed on one of them only. The driver determines from
the program which values are invalid then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from spmd.engine.program.program import Program, read_by

__all__ = ["poisoned"]

R = TypeVar("R")


def poisoned(
    program: Program, lost: Mapping[int, R], failed: Mapping[int, R]
) -> tuple[dict[int, R], dict[int, R]]:
    """Return which values of a program are lost, and which of its failures are new.

    Args:
        program: the program that was run.
        lost: inputs that were lost before, by number, each with the reason.
        failed: instructions that have failed, by number, each with the reason.

    Returns:
        All values that are lost, and the failures that do not result from something lost; each with the
        reason.
    """
    values = dict(lost)
    news: dict[int, R] = {}
    following = len(program.inputs)
    for number, instruction in enumerate(program.instructions):
        reason = next(
            (values[each] for each in read_by((instruction.args, instruction.kwargs)) if each in values), None
        )
        if reason is None and number in failed:
            reason = news[number] = failed[number]
        results = range(following, following + len(instruction.results))
        following = results.stop
        if reason is not None:
            values.update(dict.fromkeys(results, reason))
    return values, news
