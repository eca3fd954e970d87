"""Which layouts of a program's inputs cost least.

Few combinations are all tried. Of many, descent begins at several plans (all whole, the batch cut, all cut
along their largest dimension, and what the caller gives), and changes one input at a time, then two, as long
as that is cheaper. It ends after so many evaluations, and not after some time, so that it always finds the
same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from spmd.engine.auto.cost import Cost, cost_of
from spmd.engine.program import Layout, MeshKey, Meta, Program

__all__ = ["Chosen", "candidates", "choose_layouts"]

_ALL: Final = 512
"""So many combinations are all tried."""

Plan = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was found.

    Attributes:
        layouts: of the inputs.
        cost: with these.
        whole: with every input whole on every worker, but for those that were fixed.
        evaluations: how many plans were looked at.
    """

    layouts: Plan
    cost: Cost
    whole: Cost
    evaluations: int


def candidates(meta: Meta, mesh: MeshKey) -> list[Layout]:
    """How a tensor may lie: whole, or cut along each axis of the mesh in any dimension that is long enough.

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
    starts: Sequence[Sequence[Layout]] = (),
    limit: int = 4000,
) -> Chosen:
    """The cheapest layouts that are found for a program's inputs.

    Args:
        program: as recorded, on whole inputs.
        mesh: of all workers.
        fixed: inputs, by number, of which the user has said where they lie.
        updates: see :func:`spmd.engine.auto.cost.cost_of`.
        starts: plans to begin with, besides those above. None of them is cheaper than what is found.
        limit: evaluations, at most.

    Example::

        choose_layouts(program, MeshKey((0, 1, 2, 3), (4,))).layouts
    """
    return _Search(program, mesh, fixed or {}, updates or {}, limit).run(starts)


class _Search:
    def __init__(
        self,
        program: Program,
        mesh: MeshKey,
        fixed: Mapping[int, Layout],
        updates: Mapping[int, int],
        limit: int,
    ) -> None:
        self._program, self._updates, self._limit = program, updates, limit
        self._choices = [
            [fixed[number]] if number in fixed else candidates(meta, mesh)
            for number, meta in enumerate(program.inputs)
        ]
        self._costs: dict[Plan, Cost] = {}
        self._free = [number for number, each in enumerate(self._choices) if len(each) > 1]

    def run(self, starts: Sequence[Sequence[Layout]]) -> Chosen:
        whole = tuple(each[0] for each in self._choices)
        if math.prod(len(each) for each in self._choices) <= min(_ALL, self._limit):
            for plan in itertools.product(*self._choices):
                self._cost(plan)
        else:
            plans = [whole, self._batch_cut(), self._largest_cut(), *map(tuple, starts)]
            plans.sort(key=lambda plan: self._cost(plan).total)
            for place, plan in enumerate(plans):
                budget = (self._limit - len(self._costs)) // (len(plans) - place)
                self._descend(plan, len(self._costs) + budget)
        best = min(self._costs, key=lambda plan: self._costs[plan].total)
        return Chosen(best, self._cost(best), self._cost(whole), len(self._costs))

    def _cost(self, plan: Plan) -> Cost:
        found = self._costs.get(plan)
        if found is None:
            found = self._costs[plan] = cost_of(self._program, plan, self._updates)
        return found

    def _batch_cut(self) -> Plan:
        """What is no parameter, along its first dimension."""
        return tuple(
            self._cut(number, 0) if number not in self._updates else choices[0]
            for number, choices in enumerate(self._choices)
        )

    def _largest_cut(self) -> Plan:
        shapes = [meta.shape for meta in self._program.inputs]
        return tuple(
            self._cut(number, max(range(len(shape)), key=lambda dim: shape[dim]) if shape else 0)
            for number, shape in enumerate(shapes)
        )

    def _cut(self, number: int, dim: int) -> Layout:
        """The one of an input's layouts that cuts this dimension along most axes; else whole."""
        choices = self._choices[number]

        def cuts(layout: Layout) -> int:
            if any(isinstance(each, Shard) and each.dim != dim for each in layout.placements):
                return -1
            return sum(isinstance(each, Shard) for each in layout.placements)

        return max(choices, key=cuts)

    def _descend(self, plan: Plan, until: int) -> None:
        improved = True
        while improved and len(self._costs) < until:
            improved = False
            for count in (1, 2):
                for numbers in itertools.combinations(self._free, count):
                    for layouts in itertools.product(*(self._choices[each] for each in numbers)):
                        changed = list(plan)
                        for number, layout in zip(numbers, layouts, strict=True):
                            changed[number] = layout
                        other = tuple(changed)
                        if self._cost(other).total < self._cost(plan).total:
                            plan, improved = other, True
                        if len(self._costs) >= until:
                            return
                if improved:
                    break
