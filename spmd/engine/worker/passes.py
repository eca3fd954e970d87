"""Passes over the steps of a linked program: the same values, with less communication, memory and waiting.

*Memory.* A step may write its result over an argument if that cannot be observed: the argument and all values
that may share memory with it are read by no later step and are not outputs, its memory belongs to the run,
and no element occurs twice in it. Sharing of memory is known from the operators' schemas and from rules.

*Gathers* are in a file of their own (``spmd.engine.worker.gathers``).

*Reductions* begin as soon as their inputs exist, in buckets if they are small, and are awaited where their
result is first used. All workers compute the same order, since it depends on whole shapes only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from spmd.engine.program.program import Meta, Program, Ref
from spmd.engine.program.redistribution import Begun, begin_reducing
from spmd.engine.worker.gathers import gather_ahead
from spmd.engine.worker.local_calls import LocalCall, last_uses

__all__ = ["copied_outputs", "may_alias", "optimize", "overlaps", "overwriting"]

aten: Any = torch.ops.aten

_BUCKET_BYTES: Final = 1 << 20
"""Number of bytes at which a bucket's reduction begins. Larger tensors are reduced separately."""

_PENDING_BYTES: Final = 32 << 20
"""Maximum number of bytes that wait to be reduced and scattered."""


def optimize(program: Program, steps: Sequence[LocalCall], metas: Sequence[Meta | None]) -> list[LocalCall]:
    """Rewrite the steps. Values beyond the metas are new ones.

    Args:
        steps: linked steps.
        metas: metas of all values.
    """
    handles = itertools.count(len(metas))
    steps = gather_ahead(program, steps, metas, handles)
    steps = _reduce_early(steps, _Memory(program, steps), metas, handles)
    memory = _Memory(program, steps)  # of the new order
    return [_overwrite(place, step, memory, metas) for place, step in enumerate(steps)]


# ---- memory


class _Memory:
    """Which values may share memory, and until when it is needed."""

    def __init__(self, program: Program, steps: Sequence[LocalCall]) -> None:
        self.inputs = range(len(program.inputs))
        self._root: dict[int, int] = {}
        self._overlapping: set[int] = set()
        self._end = len(steps)
        for step in steps:
            for result, argument in step.shared:
                self._join(result, argument)
            if step.overlaps or any(argument in self._overlapping for _, argument in step.shared):
                self._overlapping.update(value for value in step.results if value is not None)
        self._readers: dict[int, list[tuple[int, LocalCall]]] = {}
        for place, step in enumerate(steps):
            for root in {self.root(value) for value in step.reads()}:
                self._readers.setdefault(root, []).append((place, step))
        self._last: dict[int, int] = {}
        for value, place in last_uses(steps, program.outputs).items():
            root = self.root(value)
            self._last[root] = max(place, self._last.get(root, -1))

    def root(self, value: int) -> int:
        """Return a number that is equal for all values that may share memory."""
        while value in self._root:
            value = self._root[value]
        return value

    def _join(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        if one != other:
            self._root[max(one, other)] = min(one, other)

    def overlaps(self, value: int) -> bool:
        """Whether it may have elements twice."""
        return value in self._overlapping

    def may_be_overwritten(self, value: int, place: int) -> bool:
        """Whether it is not used after a step."""
        return value not in self._overlapping and self._last[self.root(value)] <= place

    def is_seen_only_by(self, step: LocalCall, value: int, place: int) -> bool:
        """Whether no other step reads a value's memory after a place, so that this one may change it."""
        root = self.root(value)
        if value in self._overlapping or self._last[root] >= self._end:
            return False
        return all(other is step or before <= place for before, other in self._readers.get(root, ()))


def may_alias(op: Any) -> bool:
    """Whether a result of an operator may share memory with an argument."""
    hidden = op._schema.name.startswith(("aten::unsafe_", "aten::_unsafe_view"))
    return hidden or any(each.alias_info is not None for each in op._schema.returns)


def overlaps(op: Any) -> bool:
    """Whether its result may have elements twice."""
    return bool(op._schema.name.startswith(("aten::expand", "aten::as_strided", "aten::unfold")))


@functools.cache
def overwriting(op: Any) -> tuple[Callable[..., Any] | None, tuple[int, ...]]:
    """Return a function that writes an operator's result over its first argument; None if there is no such
    form.

    Such operators read their first argument, or list, element by element.
    """
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    lists = name.startswith("_foreach_") and not name.startswith(("_foreach_norm", "_foreach_max"))
    packet = getattr(aten, f"{name}_", None)
    if not (torch.Tag.pointwise in op.tags or lists) or packet is None:
        return None, ()
    if schema.is_mutable or op._overloadname not in packet.overloads():
        return None, ()
    found = getattr(packet, op._overloadname)
    kinds = [[(each.name, str(each.type)) for each in one._schema.arguments] for one in (op, found)]
    written = [each.name for each in found._schema.arguments if each.alias_info is not None]
    if kinds[0] != kinds[1] or written != [schema.arguments[0].name]:
        return None, ()
    return functools.partial(_giving_first, found._op) if lists else found._op, (0,)


def _giving_first(
    function: Callable[..., Any], first: list[Tensor], *args: Any, **kwargs: Any
) -> list[Tensor]:
    """Adapt an in-place operator on lists, which returns nothing."""
    function(first, *args, **kwargs)
    return first


def _overwrite(place: int, step: LocalCall, memory: _Memory, metas: Sequence[Meta | None]) -> LocalCall:
    """Return the step, with its results over its arguments if that is possible."""
    if step.over is None or any(place >= len(step.args) for place in step.written):
        return step
    arguments = [step.args[each] for each in step.written]
    targets = [
        ref
        for argument in arguments
        for ref in (argument if isinstance(argument, (list, tuple)) else [argument])
    ]
    if not all(isinstance(each, Ref) for each in targets):
        return step
    roots = {memory.root(each.index) for each in targets}
    lists = any(isinstance(each, (list, tuple)) for each in arguments)
    # An element is read before it is written over; but one index of a list is done before another is read.
    others = [each for each in step.others() if lists or each not in targets]
    if len(roots) < len(targets) or any(memory.root(each.index) in roots for each in others):
        return step
    if not all(memory.may_be_overwritten(each.index, place) for each in targets):
        return step
    if len(step.results) == len(targets):  # else results are arguments, which have their own shapes
        pairs = zip(targets, step.results, strict=True)
        for target, result in pairs:
            if not _same_part(metas[target.index], None if result is None else metas[result]):
                return step
    return replace(step, function=step.over)


def _same_part(before: Meta | None, after: Meta | None) -> bool:
    """Whether a shard, with its strides, fits the memory of another.

    Strides matter to later steps: some kernels assume that an argument is contiguous.
    """
    return before is not None and after in (None, before)


def copied_outputs(program: Program, steps: Sequence[LocalCall]) -> list[LocalCall]:
    """Copy outputs that share memory, so that each has memory of its own when the next program runs."""
    memory = _Memory(program, steps)
    taken = {memory.root(value) for value in program.outputs if value in memory.inputs}
    copies: list[LocalCall] = []
    for value in program.outputs:
        if value in memory.inputs:
            continue
        root = memory.root(value)
        if root in taken or memory.overlaps(value):
            index = steps[-1].index
            copies.append(
                LocalCall(index, aten.clone.default._op, (Ref(value),), {}, (value,), single=True, alone=True)
            )
        taken.add(root)
    return copies


# ---- reductions


class _Bucket:
    """Reductions that are done together."""

    def __init__(self, first: LocalCall) -> None:
        self.first, self.steps, self.owned, self.bytes = first, list[LocalCall](), list[bool](), 0
        self.handle: int | None = None

    @property
    def result(self) -> int:
        """One of its results."""
        (value,) = self.steps[0].results
        assert value is not None
        return value

    def add(self, step: LocalCall, size: int, owned: bool) -> None:
        self.steps.append(step)
        self.owned.append(owned)
        self.bytes += size

    def _begin(self, function: Callable[..., Any], **given: Any) -> LocalCall:
        args = [each.args[0] for each in self.steps]
        moves = [each.moves[0][0] for each in self.steps]
        group = self.first.moves[0][1]
        bound = functools.partial(function, moves=moves, group=group, owned=tuple(self.owned))
        return replace(self.first, function=bound, args=(args,), moves=(), **given)

    def at_once(self) -> LocalCall:
        """Reduce, and wait."""
        return self._begin(_reduce_now, results=self._results(), single=False)

    def start(self, handle: int) -> LocalCall:
        """Begin."""
        self.handle = handle
        shared = tuple((handle, each.args[0].index) for each in self.steps)  # it is still being sent
        return self._begin(_begin, results=(handle,), single=True, shared=shared)

    def wait(self) -> LocalCall:
        """Wait for the collective that was begun."""
        assert self.handle is not None
        arg = Ref(self.handle)
        return replace(
            self.first, function=Begun.finish, args=(arg,), moves=(), results=self._results(), single=False
        )

    def _results(self) -> tuple[int | None, ...]:
        return tuple(each.results[0] for each in self.steps)


_reduce_now: Final = lambda tensors, **given: begin_reducing(tensors, blocks=True, **given).finish()  # noqa: E731
_begin: Final = functools.partial(begin_reducing, blocks=False)


def _reduce_early(
    steps: Sequence[LocalCall], memory: _Memory, metas: Sequence[Meta | None], handles: Iterator[int]
) -> list[LocalCall]:
    """Begin reductions where their argument is made, and wait for them where their result is needed.

    If results are smaller than what is reduced, and too much is in progress, the oldest is awaited.
    """
    done: list[LocalCall] = []
    filling: dict[Any, _Bucket] = {}
    bucket_of: dict[int, _Bucket] = {}
    pending: list[_Bucket] = []
    wanted: dict[int, list[LocalCall]] = {}
    for step in steps:
        if _is_reduction(step):
            wanted.setdefault(step.args[0].index, []).append(step)

    def collect(value: int, place: int) -> None:
        for step in wanted.pop(value, ()):
            meta = metas[value]
            assert meta is not None
            move, _ = step.moves[0]
            size = math.prod(meta.shape) * meta.dtype.itemsize
            key = (
                move.mesh,
                move.axis,
                move.kind,
                move.operation,
                meta.dtype,
                value if size > _BUCKET_BYTES else None,
            )
            bucket = filling.setdefault(key, _Bucket(step))
            bucket.add(step, size, memory.is_seen_only_by(step, value, place))
            bucket_of[step.results[0]] = bucket  # type: ignore[index]
            if bucket.bytes > _BUCKET_BYTES:
                done.append(filling.pop(key).start(next(handles)))
                if move.kind == "reduce_scatter":
                    pending.append(bucket)
        while sum(each.bytes for each in pending) > _PENDING_BYTES:
            settle(pending.pop(0).result, place)

    def settle(value: int, place: int) -> None:
        bucket = bucket_of.get(value)
        if bucket is None:
            return
        if bucket.handle is None:
            for key in [key for key, each in filling.items() if each is bucket]:
                del filling[key]
            done.append(bucket.at_once())
        else:
            done.append(bucket.wait())
        made = [each for step in bucket.steps for each in step.results if each is not None]
        for each in made:
            del bucket_of[each]
        for each in made:
            collect(each, place)

    for value in memory.inputs:
        collect(value, -1)
    for place, step in enumerate(steps):
        if _is_reduction(step):
            continue
        for value in sorted(step.reads()):
            settle(value, place)
        done.append(step)
        for made in step.results:
            if made is not None:
                collect(made, place)
    while bucket_of:
        settle(min(bucket_of), len(steps))
    return done


def _is_reduction(step: LocalCall) -> bool:
    """Whether it is one reduction, and needed."""
    return len(step.moves) == 1 and step.moves[0][0].kind.startswith("reduce") and step.results != (None,)
