"""Passes over a linked program's steps that gather: fewer, sooner, and during other computations.

Tensors that are gathered soon after one another are gathered together, and each gathering starts when the
previous one is complete, if its inputs exist by then. So a worker holds at most two that are not used yet. A
tensor that both a layer's forward and the following backward need is gathered once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spmd.engine.program.program import Meta, Program, Ref
from spmd.engine.program.redistribution import Begun, begin_gathering
from spmd.engine.worker.local_calls import LocalCall

__all__ = ["gather_ahead"]

_BYTES: Final = 4 << 20
"""Maximum number of bytes gathered at once before they are needed."""


def gather_ahead(
    program: Program, steps: Sequence[LocalCall], metas: Sequence[Meta | None], handles: Iterator[int]
) -> list[LocalCall]:
    """Gather the following tensors together with each one that is gathered, if they exist already.

    Args:
        metas: metas of all values.
        handles: numbers for new values.
    """
    groups = _groups(program, _views_first(steps, len(program.inputs)), metas)
    starts: dict[int, list[_Group]] = {}
    for before, group in zip(groups.in_order, groups.in_order[1:], strict=False):
        if group.ready <= before.place:
            group.handle = next(handles)
            starts.setdefault(before.place, []).append(group)
    done: list[LocalCall] = []
    for place, step in enumerate(groups.steps):
        if place in groups.taken:
            continue
        done.append(groups.by_place[place].arrive() if place in groups.by_place else step)
        done += [each.start() for each in starts.get(place, ())]
    return done


@dataclass(eq=False)
class _Group:
    """Steps that are gathered together.

    Attributes:
        place: index of the first step that needs one of them.
        ready: index after which all of their inputs exist.
        which: for each of them, the index into ``sources`` that it gathers.
        handle: number of the begun collective, if it begins sooner.
    """

    place: int
    ready: int
    steps: list[LocalCall]
    sources: list[LocalCall]
    which: list[int]
    handle: int | None = None

    def arrive(self) -> LocalCall:
        """Wait for all results."""
        results = tuple(each.results[0] for each in self.steps)
        first = replace(self.steps[0], moves=(), results=results, single=False, shared=self._twice())
        if self.handle is None:
            begin = self._begin(blocks=True)
            return replace(
                first,
                function=functools.partial(_gather, begin),
                args=([each.args[0] for each in self.sources],),
            )
        return replace(first, function=Begun.finish, args=(Ref(self.handle),))

    def start(self) -> LocalCall:
        """Begin."""
        assert self.handle is not None
        return replace(
            self.steps[0],
            function=self._begin(blocks=False),
            args=([each.args[0] for each in self.sources],),
            moves=(),
            results=(self.handle,),
            single=True,
            shared=tuple((self.handle, each.args[0].index) for each in self.sources),  # it is being sent
        )

    def _begin(self, *, blocks: bool) -> Any:
        return functools.partial(
            begin_gathering,
            moves=[each.moves[0][0] for each in self.sources],
            group=self.sources[0].moves[0][1],
            which=tuple(self.which),
            blocks=blocks,
        )

    def _twice(self) -> tuple[tuple[int, int], ...]:
        """Return results that are one tensor."""
        first: dict[int, Any] = {}
        pairs = []
        for step, which in zip(self.steps, self.which, strict=True):
            result = step.results[0]
            assert result is not None
            if first.setdefault(which, result) != result:
                pairs.append((result, first[which]))
        return tuple(pairs)


def _gather(begin: Any, tensors: Any) -> Any:
    return begin(tensors).finish()


@dataclass(eq=False)
class _Groups:
    steps: Sequence[LocalCall]
    in_order: list[_Group] = field(default_factory=list)
    by_place: dict[int, _Group] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


def _groups(program: Program, steps: Sequence[LocalCall], metas: Sequence[Meta | None]) -> _Groups:
    """Return which steps are gathered together; each group is at the place of its first step."""
    made = dict.fromkeys(range(len(program.inputs)), -1)
    made |= {value: place for place, step in enumerate(steps) for value in step.results if value is not None}
    gathers = [place for place, step in enumerate(steps) if _is_gather(step)]
    outputs = frozenset(program.outputs)
    found = _Groups(steps)
    for number, place in enumerate(gathers):
        if place in found.taken:
            continue
        first = steps[place]
        group = _Group(place, made[first.args[0].index], [first], [first], [0])
        total = 0
        for later in gathers[number + 1 :]:
            other = steps[later]
            if later in found.taken or _source(other, metas) != _source(first, metas):
                continue
            which = _same(group, other, outputs)
            if which is None:
                total += _size(other, metas)
                if total > _BYTES:
                    break
                if made[other.args[0].index] >= place:
                    continue
                which = len(group.sources)
                group.sources.append(other)
                group.ready = max(group.ready, made[other.args[0].index])
            group.steps.append(other)
            group.which.append(which)
            found.taken.add(later)
        found.in_order.append(group)
        found.by_place[place] = group
    return found


def _same(group: _Group, step: LocalCall, outputs: frozenset[int]) -> int | None:
    """Return which one of a group gathers the same; outputs have memory of their own."""
    for which, each in enumerate(group.sources):
        if each.args == step.args and each.moves[0][0] == step.moves[0][0]:
            values = [
                other.results[0] for other, at in zip(group.steps, group.which, strict=True) if at == which
            ]
            return None if outputs.intersection([*values, step.results[0]]) else which
    return None


def _source(step: LocalCall, metas: Sequence[Meta | None]) -> tuple[Any, ...]:
    meta = metas[step.args[0].index]
    assert meta is not None
    move, _ = step.moves[0]
    return move.mesh, move.axis, meta.dtype


def _size(step: LocalCall, metas: Sequence[Meta | None]) -> int:
    meta = metas[step.args[0].index]
    assert meta is not None
    size: int = math.prod(meta.shape) * meta.dtype.itemsize
    return size


def _is_gather(step: LocalCall) -> bool:
    if len(step.moves) != 1 or step.results == (None,):
        return False
    move = step.moves[0][0]
    return bool(move.kind == "gather" and move.strided == 1)


def _views_first(steps: Sequence[LocalCall], inputs: int) -> list[LocalCall]:
    """Move views of inputs, which cost nothing, to the front, so that they may be gathered early."""
    there = set(range(inputs))
    first: list[LocalCall] = []
    rest: list[LocalCall] = []
    for step in steps:
        reads = step.reads()
        if step.shared and not step.moves and reads and reads <= there:
            first.append(step)
            there.update(value for value in step.results if value is not None)
        else:
            rest.append(step)
    return first + rest
