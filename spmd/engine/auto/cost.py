"""What a program costs one worker, if its inputs lie so.

The rules say where the operations' tensors must lie, as when the program was recorded; what that moves, and
what each worker then reads, writes and holds, is counted in bytes. Bytes on the wire are those of rings: a
reduction over n workers sends each byte 2 (n - 1) / n times, a gather or scatter (n - 1) / n times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from spmd.engine.interpreter import resolve
from spmd.engine.layouts import local_shape, plan
from spmd.engine.operators import Propagated, propagate
from spmd.engine.program import REDISTRIBUTE, Layout, Meta, Program, Ref

__all__ = ["Cost", "cost_of"]

_WIRE: Final = 4.0
"""A byte that is sent costs as much as so many bytes read or written."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes, for the worker that has most of them.

    Attributes:
        wire: sent.
        touched: read and written by operations.
        held: of the program's inputs.
    """

    wire: float
    touched: float
    held: float

    @property
    def total(self) -> float:
        """What is compared."""
        return _WIRE * self.wire + self.touched + self.held


def cost_of(program: Program, inputs: Sequence[Layout], updates: Mapping[int, int] | None = None) -> Cost:
    """The cost of a run.

    Args:
        program: its own layouts do not count, but for redistributions that shard: these are the user's marks.
        inputs: a layout for each input.
        updates: inputs, by number, that the next run finds as this output (a value's number) leaves them:
            parameters. It comes back to where the input was.

    Example::

        cost_of(program, [REPLICATED] * len(program.inputs)).wire  # 0.0
    """
    return _Walk(program, inputs).cost(updates or {})


class _Walk:
    def __init__(self, program: Program, inputs: Sequence[Layout]) -> None:
        self._metas: list[Meta | None] = [
            replace(meta, layout=layout) for meta, layout in zip(program.inputs, inputs, strict=True)
        ]
        self._moved: dict[tuple[int, Layout], Layout] = {}
        self._wire = self._touched = 0.0
        self._held = float(sum(_local_bytes(each) for each in self._metas if each is not None))
        for each in program.instructions:
            if each.operator == REDISTRIBUTE:
                self._redistribute(each.args[0].index, each.args[1], each.results)
            elif each.operator.startswith("spmd::"):
                self._metas += each.results
            else:
                self._operation(each)

    def cost(self, updates: Mapping[int, int]) -> Cost:
        for number, output in updates.items():
            before = self._metas[number]
            assert before is not None
            self._move(output, before.layout)
        return Cost(self._wire, self._touched, self._held)

    def _redistribute(self, value: int, layout: Layout, results: Sequence[Meta | None]) -> None:
        meta = self._metas[value]
        assert meta is not None
        if layout.mesh is not None:
            meta = self._move(value, layout)
        self._metas += [None if each is None else replace(each, layout=meta.layout) for each in results]

    def _operation(self, instruction: Any) -> None:
        refs: list[int] = []
        args = tuple(self._filled(each, refs) for each in instruction.args)
        kwargs = tuple((name, self._filled(each, refs)) for name, each in instruction.kwargs)
        told = _propagated(instruction.operator, args, kwargs)
        for ref, wanted in zip(refs, told.inputs, strict=True):
            self._touched += _local_bytes(self._move(ref, wanted))
        for result, layout in zip(instruction.results, told.results, strict=True):
            made = None if result is None else replace(result, layout=layout)
            self._metas.append(made)
            if made is not None:
                self._touched += _local_bytes(made)

    def _filled(self, arg: Any, refs: list[int]) -> Any:
        if isinstance(arg, Ref):
            refs.append(arg.index)
            return self._metas[arg.index]
        if isinstance(arg, (list, tuple)):
            return tuple(self._filled(each, refs) for each in arg)
        return arg

    def _move(self, value: int, layout: Layout) -> Meta:
        meta = self._metas[value]
        assert meta is not None
        if meta.layout == layout:
            return meta
        moved = replace(meta, layout=layout)
        if (value, layout) not in self._moved:
            self._moved[value, layout] = layout
            self._wire += _wire_bytes(meta, layout)
        if meta.layout.is_partial():  # it is reduced once
            self._metas[value] = moved
        return moved


@functools.lru_cache(1 << 16)
def _propagated(operator: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Propagated:
    return propagate(resolve(operator), args, dict(kwargs))


@functools.lru_cache(1 << 16)
def _local_bytes(meta: Meta) -> int:
    return math.prod(local_shape(meta, _first(meta.layout))) * meta.dtype.itemsize


def _first(layout: Layout) -> int:
    """The worker whose shards are the largest."""
    return 0 if layout.mesh is None else layout.mesh.devices[0]


@functools.lru_cache(1 << 16)
def _wire_bytes(meta: Meta, layout: Layout) -> float:
    rank = _first(layout if layout.mesh is not None else meta.layout)
    size, total = float(_local_bytes(meta)), 0.0
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
