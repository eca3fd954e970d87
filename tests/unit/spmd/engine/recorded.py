"""Programs made by calling operators on whole tensors, and workers as threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd.engine.driver.operators import Propagated, functional_name, propagate
from spmd.engine.program.layouts import coordinates
from spmd.engine.program.program import (
    REDISTRIBUTE,
    REPLICATED,
    Instruction,
    Layout,
    MeshKey,
    Meta,
    Program,
    Ref,
)
from spmd.engine.program.redistribution import take_shard
from spmd.engine.worker.interpreter import LinkedProgram, resolve
from tests.unit.spmd.collectives.ranks import in_threads

_PATIENCE: Final = 20.0


class _Done:
    def wait(self) -> None:
        pass


class MemoryGroup:
    """A process group of threads, for one of them."""

    def __init__(self, shared: _Shared, place: int) -> None:
        self._shared, self._place = shared, place

    def size(self) -> int:
        return self._shared.size

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        (mine,) = tensors
        reduced = reduce(self._shared.exchange(self._place, mine.clone()), options.reduceOp)
        mine.copy_(reduced)
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> _Done:
        for output, given in zip(
            outputs[0], self._shared.exchange(self._place, inputs[0].clone()), strict=True
        ):
            output.copy_(given)
        return _Done()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> _Done:
        given = self._shared.exchange(self._place, [each.clone() for each in inputs[0]])
        outputs[0].copy_(reduce([each[self._place] for each in given], options.reduceOp))
        return _Done()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> _Done:
        given = self._shared.exchange(self._place, [each.clone() for each in inputs])
        for output, each in zip(outputs, given, strict=True):
            output.copy_(each[self._place])
        return _Done()


def reduce(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    stacked = torch.stack(list(tensors))
    kinds: dict[str, Any] = {"SUM": torch.sum, "PRODUCT": torch.prod, "MAX": torch.amax, "MIN": torch.amin}
    name = next(name for name in kinds if operation == getattr(torch.distributed.ReduceOp, name))
    reduced: Tensor = kinds[name](stacked, 0).to(stacked.dtype)
    return reduced


class _Shared:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def exchange(self, place: int, given: Any) -> list[Any]:
        self._given[place] = given
        self.barrier.wait(_PATIENCE)
        everything = list(self._given)
        self.barrier.wait(_PATIENCE)
        return everything


class World:
    """Threads and the groups of any mesh of them."""

    def __init__(self) -> None:
        self._shared: dict[Any, _Shared] = {}
        self._lock = threading.Lock()

    def mesh(self, key: MeshKey, rank: int) -> Any:
        world, at = self, coordinates(key, rank)

        class Mesh:
            def get_group(self, mesh_dim: int) -> MemoryGroup:
                line = (*at[:mesh_dim], -1, *at[mesh_dim + 1 :])
                with world._lock:
                    shared = world._shared.setdefault((key, line), _Shared(key.shape[mesh_dim]))
                return MemoryGroup(shared, at[mesh_dim])

        return Mesh()

    def abort(self) -> None:
        for each in list(self._shared.values()):
            each.barrier.abort()


class Value:
    """A recorded value, and what one process has for it."""

    def __init__(self, index: int, whole: Tensor, meta: Meta) -> None:
        self.index, self.whole, self.meta = index, whole, meta


class Recorder:
    """Runs operators on whole tensors at once, and records them, laid out."""

    def __init__(self) -> None:
        self.values: list[Value | None] = []
        self.inputs: list[Value] = []
        self.instructions: list[Instruction] = []
        self.notes: list[str] = []

    def input(self, whole: Tensor, layout: Layout = REPLICATED) -> Value:
        assert not self.instructions, "inputs come first"
        value = Value(len(self.values), whole.clone(), meta_of(whole, layout))
        self.values.append(value)
        self.inputs.append(value)
        return value

    def redistribute(self, value: Value, layout: Layout) -> Value:
        if value.meta.layout == layout:
            return value
        meta = replace(value.meta, layout=layout)
        self.instructions.append(Instruction(REDISTRIBUTE, (Ref(value.index), layout), (), (meta,)))
        return self._add(value.whole, meta)

    def _add(self, whole: Tensor, meta: Meta) -> Value:
        value = Value(len(self.values), whole, meta)
        self.values.append(value)
        return value

    def op(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The operator's results, as values; of one in place, of the functional one."""
        is_value = lambda each: isinstance(each, Value)  # noqa: E731
        metas, named = pytree.tree_map_only(Value, lambda each: each.meta, (args, kwargs))
        told: Propagated = propagate(op, metas, named)
        if told.note:
            self.notes.append(f"{op.name()}: {told.note}")
        layouts = iter(told.inputs)
        args, kwargs = pytree.tree_map_only(
            Value, lambda each: self.redistribute(each, next(layouts)), (args, kwargs), is_leaf=is_value
        )
        functional = resolve(functional_name(op))
        wholes = pytree.tree_map_only(Value, lambda each: each.whole, (args, kwargs))
        results = functional(*wholes[0], **wholes[1])
        leaves = pytree.tree_leaves(results)
        assert len(leaves) == len(told.results), (op, len(leaves), len(told.results))
        made = [
            None if whole is None else meta_of(whole, layout)
            for whole, layout in zip(leaves, told.results, strict=True)
        ]
        refs, named_refs = pytree.tree_map_only(Value, lambda each: Ref(each.index), (args, kwargs))
        self.instructions.append(
            Instruction(functional.name(), tuple(refs), tuple(named_refs.items()), tuple(made))
        )
        values: list[Any] = []
        for whole, meta in zip(leaves, made, strict=True):
            if meta is None:
                self.values.append(None)
                values.append(None)
            else:
                values.append(self._add(whole.clone(), meta))  # programs have no aliases
        return values[0] if isinstance(results, Tensor) else values

    def program(self, outputs: Sequence[Value]) -> Program:
        return Program(
            tuple(each.meta for each in self.inputs),
            tuple(self.instructions),
            tuple(each.index for each in outputs),
        )

    def run(
        self, outputs: Sequence[Value] | None = None, size: int = 2, times: int = 2
    ) -> list[list[Tensor]]:
        """What each worker has for the outputs, after running the program so many times."""
        if outputs is None:
            outputs = [each for each in self.values if each is not None]
        program, world = self.program(outputs), World()

        def body(rank: int) -> list[Tensor]:
            try:
                generator = torch.Generator()
                linked = LinkedProgram(program, rank, lambda key: world.mesh(key, rank), generator)
                for _ in range(times):
                    generator.manual_seed(0)
                    parts = [part_of(each.whole, each.meta, rank) for each in self.inputs]
                    results = linked.run(parts, ())
                return results
            except BaseException:
                world.abort()
                raise

        return in_threads(size, body)

    def check(self, outputs: Sequence[Value] | None = None, size: int = 2) -> None:
        """What workers have is what one process has."""
        if outputs is None:
            outputs = [each for each in self.values if each is not None]
        given = self.run(outputs, size)
        for place, value in enumerate(outputs):
            parts = [results[place] for results in given]
            compare(parts, value)


def compare(parts: Sequence[Tensor], value: Value) -> None:
    """Whether the workers' parts make up the value."""
    for rank, part in enumerate(parts):
        compare_part(part, value, rank)


def compare_part(part: Tensor, value: Value, rank: int) -> None:
    """Whether a worker has its part of a value. Sums are compared once they are reduced."""
    layout = value.meta.layout
    if layout.is_partial():
        return
    expected = take_shard(value.whole, layout, rank)
    if value.whole.dtype.is_floating_point:
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        assert torch.equal(part, expected)


def part_of(whole: Tensor, meta: Meta, rank: int) -> Tensor:
    """A worker's part, in memory of its own."""
    assert not meta.layout.is_partial() or meta.layout.mesh is not None
    return take_shard(whole, meta.layout, rank).clone()


def meta_of(whole: Tensor, layout: Layout = REPLICATED) -> Meta:
    return Meta(tuple(whole.shape), whole.stride(), whole.dtype, layout)
