"""The cost of a program for one worker, given the layouts of its inputs.

The rules determine the layouts that operations need, as when the program was recorded; the bytes that are
then moved, and that each worker reads, writes and holds, are counted. Bytes on the wire are those of rings: a
reduction over n workers sends each byte 2 (n - 1) / n times, a gather or scatter (n - 1) / n times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from spmd.engine.driver.operators import Propagated, propagate
from spmd.engine.program.layouts import local_shape, plan
from spmd.engine.program.program import (
    REDISTRIBUTE,
    REPLICATED,
    Instruction,
    Layout,
    Meta,
    Program,
    Ref,
    Scalar,
    read_by,
)
from spmd.engine.worker.interpreter import resolve

__all__ = ["Cost", "Costs", "cost_of", "local_bytes"]

_WIRE: Final = 4.0
"""Cost of sending a byte, in bytes read or written."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs in bytes, for the worker that has the highest.

    Attributes:
        wire: bytes sent.
        touched: bytes read and written by operations.
        held: bytes of the program's inputs.
    """

    wire: float
    touched: float
    held: float

    @property
    def total(self) -> float:
        """The sum that is compared."""
        return _WIRE * self.wire + self.touched + self.held


def cost_of(program: Program, inputs: Sequence[Layout], updates: Mapping[int, int] | None = None) -> Cost:
    """Return the cost of a run.

    Args:
        program: its own layouts do not count, except for redistributions that shard: these are the user's
            marks.
        inputs: a layout for each input.
        updates: inputs, by number, that the next run takes from this output (a value's number): parameters.
            Returning it to the layout of the input is part of the cost.

    Example::

        cost_of(program, [REPLICATED] * len(program.inputs)).wire  # 0.0
    """
    costs = Costs(program, updates)
    return costs.of([costs.number(each) for each in inputs])


class Costs:
    """The costs of a program, for one choice of layouts after another.

    Layouts are numbered here, and what an instruction needs and returns is looked up once.

    Args:
        program, updates: see :func:`cost_of`.
    """

    def __init__(self, program: Program, updates: Mapping[int, int] | None = None) -> None:
        self._updates = dict(updates or {})
        self._inputs = len(program.inputs)
        self._metas: list[Meta | None] = list(program.inputs)
        self._steps: list[_Step] = []
        for each in program.instructions:
            self._steps.append(_Step(each, tuple(read_by((each.args, each.kwargs)))))
            self._metas += each.results
        self._layouts: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._wires: dict[tuple[int, int, int], float] = {}

    def number(self, layout: Layout) -> int:
        """Return the number of a layout."""
        found = self._numbers.get(layout)
        if found is None:
            found = self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return found

    def layout(self, number: int) -> Layout:
        """Return the layout with a number."""
        return self._layouts[number]

    def of(self, inputs: Sequence[int]) -> Cost:
        """Return the cost with these layouts of the inputs, given by number."""
        return self._walk(inputs)[0]

    def layouts(self, inputs: Sequence[int]) -> list[Layout]:
        """Return the final layout of each value of the program."""
        return [self._layouts[each] for each in self._walk(inputs)[1]]

    def _walk(self, inputs: Sequence[int]) -> tuple[Cost, list[int]]:
        laid = list(inputs)
        moved: set[tuple[int, int]] = set()
        wire = touched = 0.0
        for step in self._steps:
            found = tuple([laid[ref] for ref in step.refs])
            known = step.known.get(found)
            if known is None:
                known = step.known[found] = self._learn(step, found, len(laid))
            wanted, results, count = known
            if wanted != found:
                for ref, number in zip(step.refs, wanted, strict=True):
                    if laid[ref] != number:
                        wire += self._move(ref, number, laid, moved)
            touched += count
            laid += results
        for value, output in self._updates.items():
            if laid[output] != inputs[value]:
                wire += self._move(output, inputs[value], laid, moved)
        held = float(sum(self._local(value, inputs[value]) for value in range(self._inputs)))
        return Cost(wire, touched, held), laid

    def _move(self, value: int, number: int, laid: list[int], moved: set[tuple[int, int]]) -> float:
        """Change the layout of a value; returns the cost of what is sent."""
        before, wire = laid[value], 0.0
        if (value, number) not in moved:
            moved.add((value, number))
            key = (value, before, number)
            if key not in self._wires:
                self._wires[key] = _wire_bytes(self._meta(value, before), self._layouts[number])
            wire = self._wires[key]
        if self._layouts[before].is_partial():  # it is reduced once
            laid[value] = number
        return wire

    def _learn(
        self, step: _Step, found: tuple[int, ...], first: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the layouts that an instruction needs, those of its results, and the bytes that it touches.

        Args:
            found: where its values are.
            first: the number of its first result.
        """
        each = step.instruction
        if each.operator == REDISTRIBUTE:
            layout = each.args[1]
            wanted = found if layout.mesh is None else (self.number(layout),)
            return wanted, wanted * len(each.results), 0
        if each.operator.startswith("spmd::"):
            own = [REPLICATED if meta is None else meta.layout for meta in each.results]
            return found, tuple(map(self.number, own)), 0
        metas = iter([self._meta(ref, number) for ref, number in zip(step.refs, found, strict=True)])
        args: Any = _filled(each.args, metas)
        told = _propagated(
            each.operator, args, tuple((name, _filled(arg, metas)) for name, arg in each.kwargs)
        )
        wanted, results = tuple(map(self.number, told.inputs)), tuple(map(self.number, told.results))
        values = [*step.refs, *range(first, first + len(results))]
        numbers = (*wanted, *results)
        count = sum(
            self._local(value, number)
            for value, number in zip(values, numbers, strict=True)
            if self._metas[value] is not None
        )
        return wanted, results, count

    def _meta(self, value: int, number: int) -> Meta:
        meta = self._metas[value]
        assert meta is not None
        return replace(meta, layout=self._layouts[number])

    def _local(self, value: int, number: int) -> int:
        key = (value, number)
        if key not in self._bytes:
            self._bytes[key] = local_bytes(self._meta(value, number))
        return self._bytes[key]


class _Step:
    """An instruction, the values that it uses, and what is known of it for each choice of their layouts."""

    __slots__ = ("instruction", "known", "refs")

    def __init__(self, instruction: Instruction, refs: tuple[int, ...]) -> None:
        self.instruction, self.refs = instruction, refs
        self.known: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...], int]] = {}


def _filled(tree: Any, metas: Iterator[Meta]) -> Any:
    """Return arguments with metas for tensors, and an arbitrary number for each that changes from run
    to run.
    """
    if isinstance(tree, Ref):
        return next(metas)
    if isinstance(tree, Scalar):
        return 1
    if isinstance(tree, (list, tuple)):
        return tuple(_filled(each, metas) for each in tree)
    return tree


@functools.lru_cache(1 << 16)
def _propagated(operator: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Propagated:
    return propagate(resolve(operator), args, dict(kwargs))


@functools.lru_cache(1 << 16)
def local_bytes(meta: Meta) -> int:
    """Return the bytes of a value on the worker with the largest part."""
    return math.prod(local_shape(meta, _first(meta.layout))) * meta.dtype.itemsize


def _first(layout: Layout) -> int:
    """Return the worker whose shards are the largest."""
    return 0 if layout.mesh is None else layout.mesh.devices[0]


@functools.lru_cache(1 << 16)
def _wire_bytes(meta: Meta, layout: Layout) -> float:
    rank = _first(layout if layout.mesh is not None else meta.layout)
    size, total = float(local_bytes(meta)), 0.0
    for each in plan(meta.shape, meta.layout, layout, rank):
        count = each.mesh.shape[each.axis]
        share = (count - 1) / count
        if each.kind == "gather":
            size *= count
            total += share * size
        elif each.kind == "reduce":
            total += 2 * share * size
        elif each.kind in ("reduce_scatter", "exchange"):
            total += share * size
        if each.kind in ("reduce_scatter", "slice"):
            size /= count
    return total
