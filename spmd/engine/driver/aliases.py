"""Views and writes through them, in a program that has neither.

Tensors that share memory, from the user's point of view, are *aliases* of one base. The base has a value, and
a version that counts its changes; a view has the operation that makes it from its parent. A view is computed
when it is read, and again when the base has changed since. A write to a view makes a new value of its parent,
and so on up to the base; parents in which an element occurs several times (``expand``, ``unfold``) are
skipped, since each of its places would have to change.

A tensor that is resized becomes another view of its base. If it needs more memory than the base has, the base
itself becomes a view of a larger one; its views follow when they are used next (``base_of``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from spmd.engine.driver.operation import Operation
from spmd.engine.program.metas import Spec, infer
from spmd.engine.program.program import Layout
from spmd.torch_internals import conj, conj_physical, neg_view_operator, reshape_alias

__all__ = [
    "Alias",
    "Records",
    "Value",
    "base_of",
    "enlarge",
    "read",
    "refuse_repeated",
    "same_elements",
    "steps_of_view",
    "strided",
    "write",
]

aten: Final = torch.ops.aten


ViewStep = tuple[Operation, tuple[Any, ...]]


class Value:
    """The result of an instruction, or a tensor from the driver. It never changes.

    Attributes:
        spec: its spec.
        index: its index in the recording that makes or uses it: inputs are -1, -2 and so on.
        recording: that recording.
        remote: keeps it alive on the workers, once it is there.
        data: content on the CPU if it is not with the workers yet: the whole, or a list of the workers'
        parts.
        uninitialized: whether its content is undefined.
    """

    __slots__ = ("__weakref__", "data", "index", "recording", "remote", "spec", "uninitialized")

    def __init__(
        self, spec: Spec, index: int = 0, recording: Any = None, data: Tensor | list[Tensor] | None = None
    ) -> None:
        self.spec = spec
        self.index = index
        self.recording = recording
        self.data = data
        self.remote: Any = None
        self.uninitialized = False


class Alias:
    """A tensor, or a view of one.

    Attributes:
        value: for a base, its current value; for a view, its value at ``version``.
            spec: the tensor's shape and strides as the user sees them, and the layout of ``value``.
            base: the base, or what was the base before it was enlarged; None for a base itself.
            parent: the tensor that it is a view of.
            step: the operation that makes it from its parent, with its other arguments.
            version: for a base, the number of its changes; for a view, the base's version that it shows.
    """

    __slots__ = ("base", "parent", "spec", "step", "value", "version")

    base: Alias | None

    def __init__(
        self, value: Value | None, spec: Spec, parent: Alias | None = None, step: ViewStep | None = None
    ) -> None:
        self.value = value
        self.spec = spec
        self.parent = parent
        self.step = step
        if parent is None:
            self.base = None
            self.version = 0
        else:
            self.base = parent.base or parent
            self.version = -1  # it is computed when it is read


class Records(Protocol):
    """The interface of a recorder to this module."""

    def record(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] = ..., /
    ) -> Sequence[Any]: ...

    def view(self, parent: Alias, operation: Operation, args: tuple[Any, ...], /) -> Value: ...

    def moved(self, value: Value, layout: Layout, /) -> Value: ...

    def changed(self, old: Value, new: Value, /) -> None: ...


def read(recorder: Records, alias: Alias) -> Value:
    """Return a tensor's current value."""
    parent = alias.parent
    if parent is None or alias.version == base_of(alias).version:
        assert alias.value is not None
        return alias.value
    read(recorder, parent)
    assert alias.step is not None
    value = recorder.view(parent, *alias.step)
    _show(alias, value)
    return value


def _show(alias: Alias, value: Value) -> None:
    alias.value = value
    alias.spec = alias.spec.laid_out(value.spec.layout)
    if alias.parent is not None:
        alias.version = base_of(alias).version


def base_of(alias: Alias) -> Alias:
    """Return the base whose memory a tensor shows: the tensor itself if it is a base."""
    base = alias.base
    if base is None:
        return alias
    if base.base is not None:
        base = alias.base = base_of(base)
    return base


def write(recorder: Records, alias: Alias, new: Value) -> None:
    """Change a tensor.

    Args:
        new: of the same shape and dtype. The tensor stays laid out as it was, unless that is a sum.
    """
    parent = alias.parent
    if parent is None:
        old = alias.value
        assert old is not None
        layout = old.spec.layout
        if layout is not new.spec.layout and not old.uninitialized and not layout.is_partial():
            new = recorder.moved(new, layout)
        recorder.changed(old, new)
        _show(alias, new)
        alias.version += 1
        return
    steps = _steps_from(parent, alias)
    source = alias
    for _ in steps:
        assert source.parent is not None
        source = source.parent
    if len(steps) == 1 and not alias.spec.repeats:
        ((operation, args),) = steps
        changed = _with_written(recorder, source, operation.overload, args, new)
    else:
        changed = _scattered_by_index(recorder, source, steps, new)
    write(recorder, source, changed)
    if not alias.spec.repeats:
        _show(alias, new)


def enlarge(recorder: Records, base: Alias, wanted: Spec) -> None:
    """Give a base the memory that a tensor needs, if it has less.

    The base becomes a view of the beginning of a new base, which has the shape of that tensor if the tensor
    shows all of it. The memory that is added is uninitialized.
    """
    begin, dtype = base.spec.offset, base.spec.dtype
    have, needed = _reach(base.spec) - begin, _reach(wanted) - begin
    if needed <= have:
        return
    is_whole = wanted.offset == begin and math.prod(wanted.shape) == needed
    shape, stride = (wanted.shape, wanted.stride) if is_whole else ((needed,), (1,))
    if have:
        old = strided(base, Spec.of((have,), (1,), dtype, offset=begin))
        (added,) = recorder.record(aten.empty.memory_format, ([needed - have],), {"dtype": dtype})
        (memory,) = recorder.record(aten.cat.default, ([old, added],))
        (memory,) = recorder.record(aten.as_strided.default, (memory, list(shape), list(stride), 0))
    else:
        args = (list(shape), list(stride))
        (memory,) = recorder.record(aten.empty_strided.default, args, {"dtype": dtype})
    memory.spec = Spec.of(shape, stride, dtype, memory.value.spec.layout, begin)
    memory.version = base.version
    shown = strided(memory, base.spec)
    base.base, base.parent, base.step = memory, shown.parent, shown.step


def _reach(spec: Spec) -> int:
    """Return the number of elements from the beginning of the memory to the last one that a tensor shows."""
    if 0 in spec.shape:
        return spec.offset
    return spec.offset + 1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))


def strided(base: Alias, spec: Spec) -> Alias:
    """Return a view of a tensor's memory, as ``as_strided`` makes it.

    It consists of slices and permutations where that is possible. Otherwise it is made of the elements in the
    order of the memory, since the strides of a value may differ from those of the tensor.
    """
    if _place(spec) == _place(base.spec):
        return base
    shape, stride, offset = spec.shape, spec.stride, spec.offset
    steps = as_strided_steps(base.spec, shape, stride, offset)
    if not steps:
        steps = [(aten.as_strided.default, (shape, stride, offset - base.spec.offset))]
        order = _memory_order(base.spec)
        if order is None:
            raise NotImplementedError(
                f"as_strided of a tensor of shape {base.spec.shape} and strides {base.spec.stride}, whose "
                "memory has gaps or is shown twice, needs elements that this tensor does not show: make a "
                "copy of it first, by .contiguous()"
            )
        flat = (aten.view.default, ((math.prod(base.spec.shape),),))
        turned = [] if order == tuple(range(len(order))) else [(aten.permute.default, (order,))]
        steps = [*turned, flat, *steps]
    for place, (operator, args) in enumerate(steps, start=1):
        known = spec if place == len(steps) else infer(operator, (base.spec, *args), {})
        base = Alias(None, known, base, (Operation.of(operator), args))
    return base


def _place(spec: Spec) -> tuple[Any, ...]:
    return spec.shape, spec.stride, spec.offset


def _memory_order(spec: Spec) -> tuple[int, ...] | None:
    """Return a tensor's dimensions, outermost in memory first; None if its memory has gaps or is shared."""
    order = tuple(sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], dim)))
    span = 1
    for dim in reversed(order):
        if spec.shape[dim] > 1 and spec.stride[dim] != span:
            return None
        span *= spec.shape[dim]
    return order


def same_elements(alias: Alias) -> Alias:
    """Return the most distant parent whose elements a tensor shows in their own dtype, neither negated nor
    conjugated.
    """
    while alias.parent is not None and alias.step is not None:
        if alias.step[0].overload in _BY_ELEMENT or alias.step[0].overload in _RETYPED:
            break
        alias = alias.parent
    return alias


def _steps_from(parent: Alias, alias: Alias) -> list[ViewStep]:
    """Return the views between an alias and the nearest parent in which each element has one position."""
    assert alias.step is not None
    steps = [alias.step]
    while parent.parent is not None and _may_overlap(parent.spec):
        assert parent.step is not None
        steps.insert(0, parent.step)
        parent = parent.parent
    return steps


def refuse_repeated(alias: Alias) -> None:
    """Raise the error of one device where a tensor that shows elements several times is to be changed."""
    if alias.parent is not None and alias.spec.repeats:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def _may_overlap(spec: Spec) -> bool:
    """Whether two of a tensor's elements may have the same memory. May be true for tensors where they
    do not.
    """
    reach = 0
    for step, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _with_written(
    recorder: Records, parent: Alias, operator: Any, args: tuple[Any, ...], new: Value
) -> Value:
    """Return the value of a parent when a view of it has become ``new``."""
    inverse = _INVERSES.get(operator)
    if operator in _RESHAPES:
        result = recorder.record(aten.view.default, (Alias(new, new.spec.dense()), list(parent.spec.shape)))
    elif operator in _SCATTERS:
        read(recorder, parent)
        result = recorder.record(_SCATTERS[operator], (parent, Alias(new, new.spec), *args))
    elif inverse is not None:
        inverse_operator, inverse_args = inverse(parent.spec, args)
        result = recorder.record(inverse_operator, (Alias(new, new.spec), *inverse_args))
    else:
        return _scattered_by_index(recorder, parent, [(Operation.of(operator), args)], new)
    value: Value = result[0].value
    return value


def _scattered_by_index(recorder: Records, source: Alias, steps: Sequence[ViewStep], new: Value) -> Value:
    """Replace elements, for views of any kind: the same views of the elements' indices show which are
    replaced.

    Raises:
        NotImplementedError: the views compute other elements from these.
    """
    shape = list(source.spec.shape)
    read(recorder, source)
    (numbers,) = recorder.record(aten.arange.default, (math.prod(shape),), {"dtype": torch.int64})
    (seen,) = recorder.record(aten.view.default, (numbers, shape))
    written = Alias(new, new.spec)
    for operation, args in steps:
        operator = operation.overload
        if operator in _BY_ELEMENT:
            (written,) = recorder.record(operator, (written,))
        elif operator in _RETYPED:
            raise NotImplementedError(
                f"a write through {operation.name} of a view that shows elements several times is not done "
                "on spmd:0: write to a clone() of the view"
            )
        else:
            (seen,) = recorder.record(operator, (_dense(seen), *args))
    (seen,) = recorder.record(aten.view.default, (_dense(seen), [-1]))
    (flat_new,) = recorder.record(aten.view.default, (_dense(written), [-1]))
    (flat,) = recorder.record(aten.view.default, (_dense(source), [-1]))
    (changed,) = recorder.record(aten.scatter.src, (flat, 0, seen, flat_new))
    (changed,) = recorder.record(aten.view.default, (changed, shape))
    value: Value = changed.value
    return value


def _dense(alias: Alias) -> Alias:
    """Return the same value for ``view``, which runs as ``reshape`` if necessary."""
    assert alias.value is not None
    return Alias(alias.value, alias.spec.dense())


# ---- views, as single steps


_RESHAPES: Final = {
    aten.view.default,
    reshape_alias,
    aten.expand.default,  # where no element is repeated
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}

_SCATTERS: Final = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}

Inverse = Callable[[Spec, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]


def _permuted_back(parent: Spec, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    count = len(parent.shape)
    order = [dim % count for dim in args[0]] if count else []
    return aten.permute.default, ([order.index(dim) for dim in range(count)],)


_INVERSES: Final[dict[Any, Inverse]] = {
    aten.transpose.int: lambda _, args: (aten.transpose.int, args),
    aten.t.default: lambda _, args: (aten.t.default, args),
    aten.permute.default: _permuted_back,
    aten.view.dtype: lambda parent, _: (aten.view.dtype, (parent.dtype,)),
    aten.view_as_real.default: lambda *_: (aten.view_as_complex.default, ()),
    aten.view_as_complex.default: lambda *_: (aten.view_as_real.default, ()),
    conj_physical: lambda *_: (conj_physical, ()),
    aten.neg.default: lambda *_: (aten.neg.default, ()),
}

_BY_ELEMENT: Final = {conj_physical, aten.neg.default}
"""Operations that are their own inverses, and commute with other views."""

_RETYPED: Final = {aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default}

_AS: Final = {conj: conj_physical, neg_view_operator: aten.neg.default}
"""Views that reinterpret the bits of a tensor on one device, and the operations for them here."""


def steps_of_view(operator: Any, parent: Alias, args: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the views that an operation makes, one step for each result.

    Args:
        args: arguments after the first, without trailing ones that the user left out; tuples for lists.
    """
    shape = parent.spec.shape
    if operator is aten.split.Tensor:
        size, dim = args[0], (args[1] if len(args) > 1 else 0)
        length = shape[dim]
        size = size or max(length, 1)
        return [
            (aten.slice.Tensor, (dim, begin, min(begin + size, length)))
            for begin in range(0, max(length, 1), size)
        ]
    if operator is aten.split_with_sizes.default:
        sizes, dim = args[0], (args[1] if len(args) > 1 else 0)
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [(aten.slice.Tensor, (dim, end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    if operator is aten.unbind.int:
        dim = args[0] if args else 0
        return [(aten.select.int, (dim, index)) for index in range(shape[dim])]
    return [(_AS.get(operator, operator), args)]


def as_strided_steps(
    base: Spec, size: Sequence[int], stride: Sequence[int], offset: int
) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Return slices and permutations of a base that are equal to an ``as_strided`` of its memory; None if
    there are none.
    """
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    offset -= base.offset
    if offset < 0 or 0 in base.shape or 0 in size:
        return None
    dims = sorted((dim for dim, n in enumerate(base.shape) if n > 1), key=lambda dim: -base.stride[dim])
    span = 1
    for dim in reversed(dims):  # dense: each stride is the number of elements below it
        if base.stride[dim] != span:
            return None
        span *= base.shape[dim]
    wanted = [index for index, n in enumerate(size) if n > 1]
    wanted.sort(key=lambda index: -stride[index])
    starts: dict[int, int] = {}
    for dim in dims:
        starts[dim], offset = divmod(offset, base.stride[dim])
        if starts[dim] >= base.shape[dim]:
            return None
    if offset:
        return None
    taken: dict[int, int] = {}
    for index in wanted:
        found = next(
            (
                dim
                for dim in dims
                if dim not in taken
                and stride[index] % base.stride[dim] == 0
                and stride[index]
                and starts[dim] + (size[index] - 1) * (stride[index] // base.stride[dim]) < base.shape[dim]
            ),
            None,
        )
        if found is None:
            return None
        taken[found] = index
    for dim in dims:
        if dim in taken:
            index = taken[dim]
            step = stride[index] // base.stride[dim]
            end = starts[dim] + (size[index] - 1) * step + 1
            if (starts[dim], end, step) != (0, base.shape[dim], 1):
                steps.append((aten.slice.Tensor, (dim, starts[dim], end, step)))
        else:
            steps.append((aten.slice.Tensor, (dim, starts[dim], starts[dim] + 1)))
    order = sorted(range(len(base.shape)), key=lambda dim: taken.get(dim, -1))
    if order != list(range(len(base.shape))):
        steps.append((aten.permute.default, (tuple(order),)))
    lengths = [size[taken[dim]] if dim in taken else 1 for dim in order]
    if lengths != list(size):
        steps.append((aten.view.default, (tuple(size),)))
    return steps
