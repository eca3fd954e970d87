"""Operators on lists of tensors, in which each index is independent: foreach and fused optimizers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from spmd.engine.program.layouts import is_shard
from spmd.engine.program.program import REPLICATED, Layout, Meta
from spmd.engine.program.redistribution import all_reduce
from spmd.engine.rules.elements import broadcast
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall
from spmd.engine.rules.reductions import reduce_norms
from spmd.torch_internals import StridedShard, foreach_norm

__all__ = ["is_list_operator", "place_lists"]

aten: Any = torch.ops.aten

_FUSED: Final = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
_STEPS: Final = "state_steps"
_NORMS: Final = "aten::_foreach_norm"
_OF_WHOLE_TENSORS: Final = ("aten::_foreach_max", "aten::_foreach_mm", "aten::_foreach_powsum")


def is_list_operator(op: Any) -> bool:
    """Whether ``place_lists`` places it."""
    name = op._schema.name.removeprefix("aten::")
    return bool(name.startswith("_foreach_") or name.rstrip("_") in _FUSED)


def place_lists(call: OperatorCall) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Return the layouts that the tensors need, and those of the results.

    All tensors of an index lie as the first list's does, or are replicated if that is a sum; along dimensions
    in which they are broadcast they are whole. Single tensors and counts of steps are replicated, and so is
    everything for operators that combine elements.
    """
    if call.op._schema.name in _OF_WHOLE_TENSORS:
        return (REPLICATED,) * len(call.tensors), (REPLICATED,) * len(call.args[0])
    lists = [each for each in (*call.args, *call.kwargs.values()) if _is_list(each)]
    first, layouts = lists[0], [_of_first(*tensors) for tensors in zip(*lists, strict=False)]
    fused = not call.op._schema.name.startswith("aten::_foreach_")
    inputs: list[Layout] = []
    results: list[Layout] = []
    for argument, value in _named(call):
        if isinstance(value, Meta):
            inputs.append(REPLICATED)
        elif _is_list(value):
            whole = argument.name == _STEPS or (fused and any(len(meta.shape) == 0 for meta in value))
            places = [
                REPLICATED if whole else _beside(place, meta.shape, head.shape)
                for meta, head, place in zip(value, first, layouts, strict=False)
            ]
            inputs += places
            if fused and f"{argument.name}_out" in _result_names(call.op):
                results += places
    if not fused:
        results = [REPLICATED] * len(first) if call.op._schema.name == _NORMS else list(layouts)
    return tuple(inputs), tuple(results)


def _of_first(first: Meta, *others: Meta) -> Layout:
    """Return the layout for the first tensor of an index: its own, with sums done; if it is broadcast,
    whole.
    """
    layout = first.layout
    shapes = first.shape, *(each.shape for each in others)
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # untyped in torch
    if layout.mesh is None or shape != first.shape:
        return REPLICATED
    return Layout.of(
        layout.mesh, tuple([Replicate() if each.is_partial() else each for each in layout.placements])
    )


def _beside(layout: Layout, shape: tuple[int, ...], first: tuple[int, ...]) -> Layout:
    """Return the layout for another tensor of an index, which is broadcast to the first one's shape."""
    if layout.mesh is None or shape == first:
        return layout
    return Layout.of(layout.mesh, tuple([_broadcast(each, shape, first) for each in layout.placements]))


def _broadcast(placement: Placement, shape: tuple[int, ...], into: tuple[int, ...]) -> Placement:
    if not is_shard(placement):
        return Replicate()
    placed = broadcast(shape, into, placement.dim)
    if isinstance(placement, StridedShard) and is_shard(placed):
        return StridedShard(placed.dim, split_factor=placement.split_factor)
    return placed


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Meta) for each in value)


def _named(call: OperatorCall) -> list[tuple[Any, Any]]:
    arguments = call.op._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    return [
        *zip(arguments, call.args, strict=False),
        *((by_name[name], value) for name, value in call.kwargs.items()),
    ]


def _result_names(op: Any) -> list[str]:
    """Return the names of the results of the functional overload, also for the in-place one."""
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    functional = getattr(getattr(aten, name), op._overloadname)
    return [each.name for each in functional._schema.returns]


@local_rule("_foreach_norm.Scalar")
def _foreach_norm(site: Site) -> Local | None:
    """All norms are reduced together."""
    metas = site.call.args[0]
    meshes = {meta.layout.mesh for meta in metas if meta.layout.mesh is not None}
    if not meshes:
        return None
    order = site.call["ord"]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place, meta in enumerate(metas):
        axes = tuple(axis for axis, each in enumerate(meta.layout.placements) if is_shard(each))
        kinds.setdefault((meta.layout.mesh, axes) if axes else (), []).append(place)
    groups = [
        (places, [site.meshes(kind[0]).get_group(axis) for axis in kind[1]])
        for kind, places in kinds.items()
        if kind
    ]

    neutral = 0.0 if order >= 0 else float("inf")  # for a worker without a part: an empty one has no largest

    def norms(tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        parts = [each if each.numel() else each.new_full((1,), neutral) for each in tensors]
        found = list(foreach_norm(parts, *args, **kwargs))
        for places, along in groups:
            together = reduce_norms(torch.stack([found[place] for place in places]), order, along)
            for place, norm in zip(places, together.unbind(), strict=True):
                found[place] = norm.clone()
        return found

    return Local(norms, site.args, site.kwargs)


@local_rule("_amp_foreach_non_finite_check_and_unscale")
def _unscale(site: Site) -> Local | None:
    """Unscale gradients. If one is infinite on one worker, it is so for all: their scale stays the same."""
    along = {
        (meta.layout.mesh, axis): None
        for meta in site.call.args[0]
        if meta.layout.mesh is not None
        for axis, placement in enumerate(meta.layout.placements)
        if not placement.is_replicate()
    }
    groups = [site.meshes(mesh).get_group(axis) for mesh, axis in along]
    if not groups:
        return None

    def unscale(*args: Any, **kwargs: Any) -> tuple[list[Tensor], Tensor]:
        unscaled, found = site.call.op(*args, **kwargs)
        for group in groups:
            all_reduce(found, "max", group)
        return unscaled, found

    return Local(unscale, site.args, site.kwargs)


@local_rule(*_FUSED, *(f"{name}.tensor_lr" for name in _FUSED))
def _fused_optimizer(site: Site) -> Local:
    """Run the operator in place, on copies or on the arguments, since the functional one only wraps it.

    Gradients are written only if they are unscaled.
    """
    functional = site.call.op
    name, overload = functional._schema.name.removeprefix("aten::"), functional._overloadname
    in_place = getattr(getattr(aten, f"{name}_"), overload)
    names = [argument.name for argument in functional._schema.arguments]
    given = [names.index(each.name.removesuffix("_out")) for each in functional._schema.returns]
    unscales = site.kwargs.get("grad_scale") is not None
    written = tuple(place for place in given if unscales or names[place] != "grads")

    # The kernels go through memory, and take for granted that all tensors of an index lie there alike.
    def over(*args: Any, **kwargs: Any) -> list[Tensor]:
        if not all(each.is_contiguous() for place in given for each in args[place]):
            return run(*args, **kwargs)
        in_place(*args, **kwargs)
        return [tensor for place in given for tensor in args[place]]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        copied = list(args)
        for place in given:
            copied[place] = [each.contiguous() for each in args[place]]
        for place in written:
            copied[place] = [each.clone() for each in copied[place]]
        return over(*copied, **kwargs)

    results = [(place, ref) for place in given for ref in site.args[place]]
    returned = tuple((result, ref) for result, (place, ref) in enumerate(results) if place not in written)
    return Local(run, site.args, site.kwargs, returned=returned, over=over, written=written)
