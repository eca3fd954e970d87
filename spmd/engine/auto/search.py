"""Finds layouts of a program's inputs with the lowest cost.

If there are few combinations, all are tried. Otherwise descent starts at several plans (all replicated, the
batch sharded, all sharded along their largest dimension), and changes all inputs of one shape at a time,
then one input, then two, as long as that is cheaper. It ends after a number of evaluations,
fewer for longer programs, and not after a time, so that its result is deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from spmd.engine.auto.cost import Cost, Costs
from spmd.engine.program.program import Layout, MeshKey, Meta, Program

__all__ = ["Chosen", "candidates", "choose_layouts"]

_ALL: Final = 512
"""Maximum number of combinations that are all tried."""

_WORK: Final = 1 << 19
"""Maximum number of instructions evaluated in all evaluations together; some microseconds each."""

_EVALUATIONS: Final = (32, 4000)
"""Minimum and maximum number of evaluations, for programs of any length."""

Plan = tuple[int, ...]
"""A layout for each input, by the number that :class:`Costs` has given it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of the search.

    Attributes:
        layouts: layouts of the inputs.
        values: final layouts of all values of the program.
        cost: cost with these.
        whole: cost with every input replicated, except for those that were fixed.
        evaluations: number of plans that were evaluated.
    """

    layouts: tuple[Layout, ...]
    values: tuple[Layout, ...]
    cost: Cost
    whole: Cost
    evaluations: int


def candidates(meta: Meta, mesh: MeshKey) -> list[Layout]:
    """Return possible layouts of a tensor: replicated, or sharded along each axis in any dimension that is
    long enough.

    Example::

        candidates(Meta((8, 4), (4, 1), torch.float32), MeshKey((0, 1), (2,)))  # whole, by rows, by columns
    """
    whole: Placement = Replicate()
    each_axis: list[list[Placement]] = [
        [whole, *(Shard(dim) for dim, length in enumerate(meta.shape) if length >= size)]
        if size > 1
        else [whole]
        for size in mesh.shape
    ]
    found = [Layout.of(mesh, placements) for placements in itertools.product(*each_axis)]
    return [each for each in found if _is_even_enough(meta, each)]


def _is_even_enough(meta: Meta, layout: Layout) -> bool:
    """Whether each worker has a part."""
    if layout.mesh is None:
        return True
    counts = [1] * len(meta.shape)
    for placement, size in zip(layout.placements, layout.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            counts[placement.dim] *= size
    return all(length >= count for length, count in zip(meta.shape, counts, strict=True))


def choose_layouts(
    program: Program,
    mesh: MeshKey,
    fixed: Mapping[int, Layout] | None = None,
    updates: Mapping[int, int] | None = None,
) -> Chosen:
    """Return the cheapest layouts that are found for a program's inputs.

    Args:
        program: as recorded, on whole inputs.
        mesh: mesh of all workers.
        fixed: inputs, by number, whose layouts the user has specified.
        updates: see :func:`spmd.engine.auto.cost.cost_of`.

    Example::

        choose_layouts(program, MeshKey((0, 1, 2, 3), (4,))).layouts
    """
    return _Search(program, mesh, fixed or {}, updates or {}).run()


class _Search:
    def __init__(
        self,
        program: Program,
        mesh: MeshKey,
        fixed: Mapping[int, Layout],
        updates: Mapping[int, int],
    ) -> None:
        self._shapes = [meta.shape for meta in program.inputs]
        self._updates = updates
        fewest, most = _EVALUATIONS
        self._limit = max(fewest, min(most, _WORK // max(len(program.instructions), 1)))
        self._costs = Costs(program, updates)
        self._choices = [
            [
                self._costs.number(each)
                for each in ([fixed[place]] if place in fixed else candidates(meta, mesh))
            ]
            for place, meta in enumerate(program.inputs)
        ]
        self._known: dict[Plan, Cost] = {}
        self._free = [place for place, each in enumerate(self._choices) if len(each) > 1]
        alike: dict[Any, list[int]] = {}
        for place in self._free:
            alike.setdefault((program.inputs[place].shape, place in updates), []).append(place)
        self._alike = [tuple(each) for each in alike.values() if len(each) > 1]

    def run(self) -> Chosen:
        whole = tuple(each[0] for each in self._choices)
        if math.prod(len(each) for each in self._choices) <= min(_ALL, self._limit):
            for plan in itertools.product(*self._choices):
                self._cost(plan)
        else:
            plans = list(dict.fromkeys([whole, self._batch_cut(), self._largest_cut()]))
            plans.sort(key=lambda plan: self._cost(plan).total)
            for place, plan in enumerate(plans):
                budget = (self._limit - len(self._known)) // (len(plans) - place)
                self._descend(plan, len(self._known) + budget)
        best = min(self._known, key=lambda plan: self._known[plan].total)
        values = self._costs.layouts(best)
        layouts = tuple(map(self._costs.layout, best))
        return Chosen(layouts, tuple(values), self._cost(best), self._cost(whole), len(self._known))

    def _cost(self, plan: Plan) -> Cost:
        found = self._known.get(plan)
        if found is None:
            found = self._known[plan] = self._costs.of(plan)
        return found

    def _batch_cut(self) -> Plan:
        """Shard everything but parameters along the first dimension."""
        return tuple(
            self._cut(place, 0) if place not in self._updates else choices[0]
            for place, choices in enumerate(self._choices)
        )

    def _largest_cut(self) -> Plan:
        return tuple(
            self._cut(place, max(range(len(shape)), key=lambda dim: shape[dim]) if shape else 0)
            for place, shape in enumerate(self._shapes)
        )

    def _cut(self, place: int, dim: int) -> int:
        """Return the layout of an input that shards this dimension along most axes; otherwise the replicated
        one.
        """

        def cuts(number: int) -> int:
            placements = self._costs.layout(number).placements
            if any(isinstance(each, Shard) and each.dim != dim for each in placements):
                return -1
            return sum(isinstance(each, Shard) for each in placements)

        return max(self._choices[place], key=cuts)

    def _descend(self, plan: Plan, until: int) -> None:
        improved = True
        while improved:
            improved = False
            for changes in (self._of_alike, self._of_one, self._of_two):
                for places, numbers in changes():
                    if len(self._known) >= until:
                        return
                    changed = list(plan)
                    for place, number in zip(places, numbers, strict=True):
                        changed[place] = number
                    other = tuple(changed)
                    if self._cost(other).total < self._cost(plan).total:
                        plan, improved = other, True
                if improved:
                    break

    def _of_alike(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for places in self._alike:
            for number in self._choices[places[0]]:
                if all(number in self._choices[each] for each in places):
                    yield places, (number,) * len(places)

    def _of_one(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for place in self._free:
            for number in self._choices[place]:
                yield (place,), (number,)

    def _of_two(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for places in itertools.combinations(self._free, 2):
            for numbers in itertools.product(*(self._choices[each] for each in places)):
                yield places, numbers
