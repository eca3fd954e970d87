"""Operators on lists of tensors, in which each index is independent: foreach and fused optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from spmd.engine.program.layouts import is_shard
from spmd.engine.program.program import REPLICATED, Layout, Meta
from spmd.engine.program.redistribution import all_reduce
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall
from spmd.engine.rules.reductions import reduce_norms
from spmd.torch_internals import foreach_norm

__all__ = ["is_list_operator", "place_lists"]

aten: Any = torch.ops.aten

_FUSED: Final = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
_STEPS: Final = "state_steps"


def is_list_operator(op: Any) -> bool:
    """Whether ``place_lists`` places it."""
    name = op._schema.name.removeprefix("aten::")
    return bool(name.startswith("_foreach_") or name.rstrip("_") in _FUSED)


def place_lists(call: OperatorCall) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Return the layouts that the tensors need, and those of the results.

    All tensors of an index have the layout of the first list's, or are replicated if that is a sum; single
    tensors and counts of steps are replicated.
    """
    first = next(
        arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, (list, tuple)) and _is_list(arg)
    )
    layouts = [_reduced(meta.layout) for meta in first]
    fused = not call.op._schema.name.startswith("aten::_foreach_")
    inputs: list[Layout] = []
    results: list[Layout] = []
    for argument, value in _named(call):
        if isinstance(value, Meta):
            inputs.append(REPLICATED)
        elif isinstance(value, (list, tuple)) and _is_list(value):
            whole = argument.name == _STEPS or (fused and any(len(meta.shape) == 0 for meta in value))
            places = [REPLICATED] * len(value) if whole else layouts[: len(value)]
            places = [
                REPLICATED if meta.shape != head.shape else place
                for meta, head, place in zip(value, first, places, strict=False)
            ]
            inputs += places
            if fused and f"{argument.name}_out" in _result_names(call.op):
                results += places
    if not fused:
        norms = call.op._schema.name.rstrip("_") in ("aten::_foreach_norm", "aten::_foreach_max")
        results = [REPLICATED] * len(first) if norms else list(layouts)
        if call.op._schema.name == "aten::_foreach_max" and len(call.args) == 1:
            inputs = [REPLICATED] * len(first)
    return tuple(inputs), tuple(results)


def _reduced(layout: Layout) -> Layout:
    """With sums done; what is sharded stays so."""
    if layout.mesh is None or not layout.is_partial():
        return layout
    return Layout.of(
        layout.mesh, tuple([Replicate() if each.is_partial() else each for each in layout.placements])
    )


def _is_list(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(each, Meta) for each in value)


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
