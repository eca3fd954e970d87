"""The layouts that an operation's tensors need, and those of its results.

The rules of this package (``spmd.engine.rules``) come first, then DTensor's, which are asked for specs only,
on meshes without process groups. Operators that neither knows run with whole tensors on every worker, and are
reported.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from rpc.runtime.interrupts import is_interruption
from rpc.runtime.torch_internals import pytree
from spmd.engine.driver.operation import Operation
from spmd.engine.program.layouts import chunks, is_local, is_shard, local_shape
from spmd.engine.program.metas import Spec, contiguous_stride, infer
from spmd.engine.program.program import REPLICATED, Layout, MeshKey, Meta
from spmd.engine.rules.catalog import (
    LOCAL_RULES,
    PLACEMENT_RULES,
    OperatorCall,
    Row,
    choose,
    is_list_operator,
    is_random,
    is_view,
    place_lists,
    placed_view,
    strided,
    tensors_of,
)
from spmd.torch_internals import DTensorSpec, OpSchema, StridedShard, TensorMeta, dtensor_operators

__all__ = ["Propagated", "propagate"]


@dataclass(frozen=True, slots=True)
class Propagated:
    """The layouts that an operation needs, and those of its results.

    Attributes:
        inputs: required layout of each tensor among the arguments, in flattened order.
        results: layout of each result, in flattened order; also of those that are None.
        note: what was replicated or redistributed, and why; None if nothing was.
    """

    inputs: tuple[Layout, ...]
    results: tuple[Layout, ...]
    note: str | None = None


class _NoRuleError(Exception):
    """The tensors must be replicated."""


def propagate(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Propagated:
    """Determine the layouts that an operation's tensors need, and those of its results. Pure.

    Args:
        op: an ``OpOverload``. For an in-place one, the result has the layout of its target; the answer is
            valid for the functional overload on the same arguments.
        args, kwargs: arguments of the operation, with a ``Meta`` for each tensor.

    Example::

        x = Meta((8, 4), (4, 1), torch.float32, Layout(mesh, (Shard(0),)))
        w = Meta((4, 2), (2, 1), torch.float32)
        propagate(torch.ops.aten.mm.default, (x, w), {}).results  # (Layout(mesh, (Shard(0),)),)
    """
    tensors = tensors_of(args, kwargs)
    if all(meta.layout.mesh is None for meta in tensors):
        count = _count_results(op, args, kwargs)
        return Propagated((REPLICATED,) * len(tensors), (REPLICATED,) * count)
    call = OperatorCall(op, tuple(args), kwargs, tensors)
    why: str | None = None
    try:
        if is_list_operator(op):
            inputs, results = place_lists(call)
        else:
            inputs, results, why = _on_one_mesh(call)
    except _NoRuleError as error:
        why = f"{op.name()} is done with whole tensors on every worker: {error}"
        inputs = (REPLICATED,) * len(tensors)
        results = (REPLICATED,) * _count_results(op, args, kwargs)
    moved = [
        f"argument {place}: {_text(meta.layout)} to {_text(wanted)}"
        for place, (meta, wanted) in enumerate(zip(tensors, inputs, strict=True))
        if not is_local(meta.layout, wanted) and not meta.layout.is_partial()
    ]
    note = "; ".join([*([why] if why else []), *moved]) or None
    return Propagated(inputs, results, note)


def _text(layout: Layout) -> str:
    return "whole" if layout.mesh is None else f"({', '.join(map(str, layout.placements))})"


# ---- meshes


def _on_one_mesh(call: OperatorCall) -> tuple[tuple[Layout, ...], tuple[Layout, ...], str | None]:
    """Return layouts on one mesh: of several meshes, the one with the most bytes is kept; tensors on others
    are replicated.
    """
    weights: dict[MeshKey, int] = {}
    for meta in call.tensors:
        if meta.layout.mesh is not None:
            weights[meta.layout.mesh] = weights.get(meta.layout.mesh, 0) + _bytes(meta)
    key = max(weights, key=lambda each: weights[each])

    def on_mesh(meta: Meta) -> Meta:
        return meta if meta.layout.mesh in (None, key) else replace(meta, layout=REPLICATED)

    if len(weights) > 1:
        args, kwargs = pytree.tree_map_only(Meta, on_mesh, (call.args, call.kwargs))
        call = OperatorCall(call.op, args, kwargs, tensors_of(args, kwargs))
    why = "its tensors are on several meshes" if len(weights) > 1 else None
    rule = PLACEMENT_RULES.get(functional_name(call.op))
    if rule is None and is_random(call.op):
        raise _NoRuleError("it draws for the whole at once")
    rows = rule(call) if rule is not None else None
    if rows is not None:
        return *_by_rows(call, rows, key), why
    try:
        return *_with_whole_sums(call, key, *_ask_dtensor(call, key)), why
    except _NoRuleError as error:
        if is_view(call.op) and (placed := placed_view(call.tensors[0], call.args[1])) is not None:
            return (placed[0],), (placed[1],), why
        return *_ask_for_less(call, key, error), f"{call.op.name()}: {error}"


def _bytes(meta: Meta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def functional_name(op: Any) -> str:
    """Return the name of the functional overload of an in-place one; otherwise its own."""
    name, _, overload = op.name().partition(".")
    if op._schema.is_mutable and name.endswith("_"):
        name = "aten::normal_functional" if name == "aten::normal_" else name[:-1]
        overload = "p" if (name, overload) == ("aten::bernoulli", "float") else overload
    return f"{name}.{overload}" if overload else name


# ---- rules of our own


def _by_rows(
    call: OperatorCall, rows: Sequence[Row], key: MeshKey
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    count = _count_results(call.op, call.args, call.kwargs)
    whole = Row((Replicate(),) * len(call.tensors), (Replicate(),) * count)
    if not rows:
        raise _NoRuleError("it has no rule for these shapes")
    bytes_of = [_bytes(meta) for meta in call.tensors]
    chosen = [
        choose(call, [*rows, *strided(call, rows, axis), whole], axis, size, bytes_of)
        for axis, size in enumerate(key.shape)
    ]
    inputs = zip(*(row.inputs for row in chosen), strict=True)
    results = zip(*(row.results for row in chosen), strict=True)
    return tuple(Layout.of(key, each) for each in inputs), tuple(Layout.of(key, each) for each in results)


# ---- DTensor's


@functools.lru_cache(maxsize=256)
def _mesh(key: MeshKey) -> DeviceMesh:
    """Return a mesh that knows its shape, and no process groups."""
    devices = torch.tensor(key.devices).view(key.shape)
    return DeviceMesh("cpu", devices, _init_backend=False, _rank=key.devices[0])


_KNOWN: Final = (Replicate, Shard, Partial, StridedShard)

_NOTHING: Final = (0,)
_MOST_TRIED: Final = 400
"""Without a rule for an operator, DTensor tries all placements of all tensors on what it is composed of, at
some milliseconds each."""

_ALL_IF_EMPTY: Final = (
    "aten::sum.dim_IntList",
    "aten::nansum",
    "aten::amax",
    "aten::amin",
    "aten::var.correction",
    "aten::std.correction",
    "aten::var_mean.correction",
)
"""Reductions over all dimensions if none is given, which DTensor's rules take for a reduction over none."""


def _ask_dtensor(call: OperatorCall, key: MeshKey) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    if is_view(call.op) and 0 in call.tensors[0].shape:
        return (call.tensors[0].layout,), (REPLICATED,)
    of_nothing = [each.shape == _NOTHING for each in call.tensors]
    if call.op.name() == "aten::cat" and any(of_nothing) and not all(of_nothing):
        return _ask_of_others(call, key)
    propagator: Any = dtensor_operators.sharding_propagator
    tables = (
        propagator.op_to_rules,
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
    )
    tried = math.prod(len(meta.shape) + 1 for meta in call.tensors)
    has_rule = any(call.op in table for table in tables)
    if tried > _MOST_TRIED and not has_rule:
        raise _NoRuleError("it has no rule")
    if not has_rule and any(0 in meta.shape for meta in call.tensors):  # reshaping in it would never end
        raise _NoRuleError("it has no rule for tensors without elements")
    mesh = _mesh(key)
    whole = (Replicate(),) * len(key.shape)

    def spec(meta: Meta) -> DTensorSpec:
        known = TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype)
        placements = meta.layout.placements or whole
        return DTensorSpec(mesh, placements, known, use_strided_shard_as_shard_order=False)

    args, kwargs = pytree.tree_map_only(Meta, spec, _from_the_first(call))
    if not has_rule:
        args, kwargs = _with_usual_numbers(call.op, args, kwargs)
    args = tuple(list(each) if isinstance(each, tuple) else each for each in args)
    if functional_name(call.op) in _ALL_IF_EMPTY and args[1:] and args[1] == []:
        args = (args[0], None, *args[2:])
    if any(isinstance(each, DTensorSpec) for each in pytree.tree_leaves(kwargs)):
        raise _NoRuleError("a tensor is given by name")
    info = propagator.op_to_schema_info.get(call.op)
    if info is None:
        info = propagator.op_to_schema_info_for_single_dim_strategy.get(call.op)
    try:  # its cache has no limit, and callers remember its answers
        sharding = propagator.propagate_op_sharding_non_cached(OpSchema(call.op, args, kwargs, info))
    except Exception as error:  # whatever its rules raise for cases that they do not cover
        if is_interruption(error):
            raise
        raise _NoRuleError(str(error).partition("\n")[0]) from error
    wanted: Any = args
    if sharding.needs_redistribute and sharding.redistribute_schema is not None:
        wanted = sharding.redistribute_schema.args_schema
    inputs = [each for each in pytree.tree_leaves(wanted) if isinstance(each, DTensorSpec)]
    outputs = sharding.output_spec
    results = [outputs] if isinstance(outputs, DTensorSpec) else list(outputs or ())
    if len(inputs) != len(call.tensors):
        raise _NoRuleError("its rule does not tell of all arguments")
    count = _count_results(call.op, call.args, call.kwargs)
    if len(results) != count:
        raise _NoRuleError("its rule does not tell of all results")
    placed = tuple(_layout(key, each) for each in results)
    partials = [each for layout in placed for each in layout.placements if isinstance(each, Partial)]
    if any(each.reduce_op in ("max", "min") for each in partials):
        _refuse_empty_parts(inputs, key)
    needed = tuple(_layout(key, each) for each in inputs)
    if len(needed) == len(placed) == 1 and is_view(call.op) and isinstance(outputs, DTensorSpec):
        for rank in key.devices:
            before = local_shape(replace(call.tensors[0], layout=needed[0]), rank)
            after = local_shape(Meta(tuple(outputs.shape), (), call.tensors[0].dtype, placed[0]), rank)
            if math.prod(before) != math.prod(after):
                raise _NoRuleError("it moves elements between workers")
    _refuse_other_shapes(call, needed, placed, key)
    return needed, placed


def _ask_of_others(call: OperatorCall, key: MeshKey) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Ask about all tensors but the empty ones of ``cat``, which takes tensors of shape ``[0]`` beside those
    of other dimensions.
    """
    kept = [each for each in call.tensors if each.shape != _NOTHING]
    needed, placed = _ask_dtensor(
        OperatorCall(call.op, (kept, *call.args[1:]), call.kwargs, tuple(kept)), key
    )
    of_kept = iter(needed)
    return tuple(REPLICATED if each.shape == _NOTHING else next(of_kept) for each in call.tensors), placed


_USUAL: Final[dict[type, int | float]] = {int: 2, float: 0.5}


def _with_usual_numbers(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with other numbers where these may change from run to run: what an operator is
    composed of may leave out a tensor for some, such as the added one for ``beta=0``. The operator itself
    still takes it, and the next run adds it.
    """
    numbers = Operation.of(op).numbers

    def usual(key: int | str, each: Any) -> Any:
        return _USUAL.get(type(each), each) if key in numbers else each

    named = {name: usual(name, each) for name, each in kwargs.items()}
    return tuple(usual(place, each) for place, each in enumerate(args)), named


_DIMENSIONS: Final = ("dim", "dims", "dim0", "dim1", "dim2", "dimension")
_ADD_ONE: Final = ("aten::unsqueeze", "aten::stack", "aten::diag_embed")


def _from_the_first(call: OperatorCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with dimensions counted from the first: many of DTensor's rules misread others."""
    rank = max(len(meta.shape) for meta in call.tensors) + (call.op._schema.name in _ADD_ONE)
    arguments = call.op._schema.arguments
    for sizes in {"input_sizes", "sizes"}.intersection(each.name for each in arguments):
        rank = len(call[sizes])
    args, kwargs = list(call.args), dict(call.kwargs)
    count = max(rank, 1)
    for place, argument in enumerate(arguments):
        if argument.name in _DIMENSIONS:
            counted = pytree.tree_map_only(int, lambda dim: dim % count, call[argument.name])
            if place < len(args):
                args[place] = counted
            elif argument.name in kwargs:
                kwargs[argument.name] = counted
    return tuple(args), kwargs


def _with_whole_sums(
    call: OperatorCall, key: MeshKey, inputs: tuple[Layout, ...], results: tuple[Layout, ...]
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Return DTensor's answer, but with whole sums in place of sharded ones, if nothing else is moved then.

    Sharded sums cost half as much at first. But if a batch is sharded over the axis on which the model is
    sharded as well, all following layers would gather their weights.
    """

    def whole(meta: Meta, wanted: Layout) -> Meta:
        placements = tuple(
            Replicate() if now.is_partial() and is_shard(want) else now
            for now, want in zip(meta.layout.placements, wanted.placements, strict=False)
        )
        return replace(meta, layout=Layout.of(key, placements)) if placements else meta

    metas = iter([whole(meta, wanted) for meta, wanted in zip(call.tensors, inputs, strict=True)])
    args, kwargs = pytree.tree_map_only(Meta, lambda _: next(metas), (call.args, call.kwargs))
    other = OperatorCall(call.op, args, kwargs, tensors_of(args, kwargs))
    if other.tensors != call.tensors:
        with contextlib.suppress(_NoRuleError):
            needed, placed = _ask_dtensor(other, key)
            if all(meta.layout == each for meta, each in zip(other.tensors, needed, strict=True)):
                return needed, placed
    return inputs, results


def _ask_for_less(
    call: OperatorCall, key: MeshKey, error: _NoRuleError
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Ask like ``_ask_dtensor``, with tensors that are replicated along one dimension of the mesh."""
    for axis in reversed(range(len(key.shape) if len(key.shape) > 1 else 0)):

        def unshard(meta: Meta, axis: int = axis) -> Meta:
            placements = meta.layout.placements
            if not placements or placements[axis].is_partial():
                return meta
            return replace(
                meta, layout=Layout.of(key, (*placements[:axis], Replicate(), *placements[axis + 1 :]))
            )

        args, kwargs = pytree.tree_map_only(Meta, unshard, (call.args, call.kwargs))
        with contextlib.suppress(_NoRuleError):
            return _ask_dtensor(OperatorCall(call.op, args, kwargs, tensors_of(args, kwargs)), key)
    raise error


def _refuse_empty_parts(specs: Sequence[DTensorSpec], key: MeshKey) -> None:
    """Refuse shards without elements, for operators that need the largest element."""
    for spec in specs:
        for each, size in zip(spec.placements, key.shape, strict=True):
            if is_shard(each) and 0 in chunks(spec.shape[each.dim], math.prod(key.shape)):
                raise _NoRuleError(f"not all of {size} workers have a part")


def _refuse_other_shapes(
    call: OperatorCall, needed: Sequence[Layout], placed: Sequence[Layout], key: MeshKey
) -> None:
    """Refuse shards whose results are not shards: some rules do not hold for all shapes that their operator
    accepts.
    """
    if call.op.name() in LOCAL_RULES or not placed:
        return
    rank = key.devices[0]  # whose parts are the largest

    def part(meta: Meta, layout: Layout) -> Meta:
        shape = local_shape(replace(meta, layout=layout), rank)
        return Meta(shape, contiguous_stride(shape), meta.dtype)

    layouts = iter(needed)
    args, kwargs = pytree.tree_map_only(
        Meta, lambda meta: part(meta, next(layouts)), (tuple(call.args), call.kwargs)
    )
    whole = pytree.tree_leaves(_inferred(call.op, call.args, call.kwargs))
    try:
        made = pytree.tree_leaves(_inferred(call.op, args, kwargs))
    except Exception as error:  # what the operator raises for such parts
        if is_interruption(error):
            raise
        raise _NoRuleError(
            f"it takes no parts of these shapes ({str(error).partition(chr(10))[0]})"
        ) from error
    for one, other, layout in zip(whole, made, placed, strict=True):
        if isinstance(one, Spec) and other.shape != local_shape(replace(one.meta, layout=layout), rank):
            raise _NoRuleError("its rule is not for these shapes")


def _layout(key: MeshKey, spec: DTensorSpec | None) -> Layout:
    if spec is None:
        return REPLICATED
    for each in spec.placements:
        if type(each) not in _KNOWN or (is_shard(each) and each.dim not in range(len(spec.shape))):
            raise _NoRuleError(f"it gives {each}")
        if isinstance(each, StridedShard):
            length = spec.shape[each.dim]
            if length % (int(each.split_factor) * math.prod(key.shape)):
                raise _NoRuleError(f"{length} rows cannot be {each}")
    if spec.shard_order != DTensorSpec.compute_default_shard_order(spec.placements):
        raise _NoRuleError("it gives shards in another order")
    return Layout.of(key, spec.placements)


# ---- how many results


def _count_results(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    returns = op._schema.returns
    if not any(isinstance(each.type, torch.ListType) for each in returns):
        return len(returns)
    if op._schema.name.startswith("aten::_foreach_"):
        return len(next(each for each in args if isinstance(each, (list, tuple))))
    if op._schema.name.removeprefix("aten::").startswith("_fused_"):
        names = [each.name.removesuffix("_out") for each in returns]
        known = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
        return sum(len(known.get(name, kwargs.get(name, ()))) for name in names)
    return len(pytree.tree_leaves(_inferred(op, args, kwargs)))


def _inferred(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result, with specs in place of tensors."""

    def spec(meta: Meta) -> Spec:
        return Spec.of(meta.shape, meta.stride, meta.dtype)

    given, named = pytree.tree_map_only(Meta, spec, (tuple(args), kwargs))
    return infer(op, given, named)
