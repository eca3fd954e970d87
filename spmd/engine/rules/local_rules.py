"""Local rules: what a worker runs on its shards, if that is not the operator on the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from spmd.engine.program.layouts import chunks, coordinates, is_shard, local_shape
from spmd.engine.program.program import Layout, MeshKey, Meta, Ref
from spmd.engine.program.redistribution import Groups
from spmd.engine.rules.placement_rules import OperatorCall

__all__ = ["LOCAL_RULES", "Local", "Site", "local_rule"]


@dataclass(frozen=True, slots=True)
class Local:
    """A call to run: ``function(*args, **kwargs)``. It returns the operator's result for local tensors.

    Attributes:
        is_view: results may share memory with arguments. Those of other functions have their own.
        returned: positions of results that are arguments, with the ``Ref`` of each.
        over: the same, with results in the memory of the arguments at ``written``, in order; None if there is
            no such form.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_view: bool = False
    returned: tuple[tuple[int, Ref], ...] = ()
    over: Callable[..., Any] | None = None
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """An instruction, as one worker links it.

    Attributes:
        call: the operator, with a ``Meta`` for each tensor.
        args, kwargs: the same, with ``Ref`` s.
        results: metas of the results; None for results that are not tensors.
        rank: rank of this worker.
        meshes: process groups, by mesh and dimension.
        generator: the generator that is the same on all workers.
    """

    call: OperatorCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Meta | None, ...]
    rank: int
    meshes: Callable[[MeshKey], Groups]
    generator: torch.Generator

    def runs(self, function: Callable[..., Any], **changed: Any) -> Local:
        """Return a call of a function with the arguments of the instruction, some changed by name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        places = {argument.name: place for place, argument in enumerate(self.call.op._schema.arguments)}
        for name, value in changed.items():
            if places[name] < len(args):
                args[places[name]] = value
            else:
                kwargs[name] = value
        return Local(function, tuple(args), kwargs)

    def local_shape(self, meta: Meta) -> tuple[int, ...]:
        """Return the shape of this worker's shard."""
        return local_shape(meta, self.rank)

    def groups(self, layout: Layout, *dims: int) -> list[Any]:
        """Return the process groups over which one of these dimensions of a tensor is sharded; over any, if
        none is given.
        """
        if layout.mesh is None:
            return []
        mesh = self.meshes(layout.mesh)
        return [
            mesh.get_group(axis)
            for axis, placement in enumerate(layout.placements)
            if is_shard(placement) and (not dims or placement.dim in dims)
        ]

    def offset(self, meta: Meta, dim: int) -> int:
        """Return the offset of this worker's shard in a dimension."""
        layout, length, begin = meta.layout, meta.shape[dim], 0
        if layout.mesh is not None:
            at = coordinates(layout.mesh, self.rank)
            for axis, placement in enumerate(layout.placements):
                if is_shard(placement) and placement.dim == dim:
                    lengths = chunks(length, layout.mesh.shape[axis])
                    begin += sum(lengths[: at[axis]])
                    length = lengths[at[axis]]
        return begin


LocalRule = Callable[[Site], "Local | None"]
LOCAL_RULES: Final[dict[str, LocalRule]] = {}
"""The local rules by the operator's name. A rule returns None if the operator itself is to be run."""


def local_rule(*names: str) -> Callable[[LocalRule], LocalRule]:
    """Register the decorated function as the rule of these operators of ``aten``."""

    def register(rule: LocalRule) -> LocalRule:
        for name in names:
            LOCAL_RULES[f"aten::{name}"] = rule
        return rule

    return register
