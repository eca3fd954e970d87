"""Marks the values that depend on a failed instruction, and no others.

A worker puts zeros in place of what an instruction would have given, and goes on, so that all workers still
meet in every collective, also if the instruction has failed on one of them only. The driver knows from the
program which values mean nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from spmd.engine.program.program import Program, Ref

__all__ = ["poisoned"]

R = TypeVar("R")


def poisoned(
    program: Program, lost: Mapping[int, R], failed: Mapping[int, R]
) -> tuple[dict[int, R], dict[int, R]]:
    """Which values of a program are lost, and which of its failures are news.

    Args:
        program: that was run.
        lost: inputs that were lost before, by number, each with the reason.
        failed: instructions that have failed, by number, each with the reason.

    Returns:
        All values that are lost, and those failures that do not come from something lost; each with the
        reason for it.
    """
    values = dict(lost)
    news: dict[int, R] = {}
    following = len(program.inputs)
    for number, instruction in enumerate(program.instructions):
        reason = next(
            (values[each] for each in _read((instruction.args, instruction.kwargs)) if each in values), None
        )
        if reason is None and number in failed:
            reason = news[number] = failed[number]
        results = range(following, following + len(instruction.results))
        following = results.stop
        if reason is not None:
            values.update(dict.fromkeys(results, reason))
    return values, news


def _read(tree: object) -> Iterator[int]:
    if isinstance(tree, Ref):
        yield tree.index
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _read(each)
