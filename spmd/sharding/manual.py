"""Tensors of which the program computes each worker's part separately.

Between :func:`enable_manual_sharding` and :func:`disable_manual_sharding` a tensor represents the part of
each worker, and has the shape of a shard. Each worker applies operations on it, and on replicated tensors, to
its own part, and nothing is communicated. Operations that combine it with sharded tensors are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.engine.api import redistributed, value_layout
from spmd.engine.driver.logical_tensor import alias_of
from spmd.engine.driver.manual import from_local, to_local
from spmd.engine.program.program import Layout
from spmd.sharding.marks import mark_sharding, remember_sharding
from spmd.sharding.mesh import Mesh, get_global_mesh
from spmd.sharding.op_sharding import MANUAL, OpSharding
from spmd.sharding.partition_spec import PartitionSpec, check_length

__all__ = [
    "disable_manual_sharding",
    "enable_manual_sharding",
    "mark_manual_sharding",
    "whole_of",
    "worker_parts",
]


def enable_manual_sharding(t: Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None) -> Tensor:
    """A tensor that stands for each worker's shard of ``t``, which is marked.

    Args:
        t, partition_spec: as in :func:`spmd.mark_sharding`.
        mesh: None for the global mesh.

    Returns:
        A tensor of the shape of a shard, with zeros for padding; its ``sharding_spec`` is ``{manual}``.

    Raises:
        ValueError: there is no mesh.

    Example::

        part = spmd.enable_manual_sharding(t, ("data", None), mesh=mesh)
        part = part - part.max()                                # of each worker's rows
        t = spmd.disable_manual_sharding(part, ("data", None), t.shape, mesh=mesh)
    """
    mesh = _given(mesh)
    mark_sharding(t, mesh, partition_spec)
    return worker_parts(t)


def worker_parts(t: Tensor) -> Tensor:
    """Return a tensor that represents each worker's shard of ``t``, whatever its sharding."""
    local: Tensor = _ToLocal.apply(t)  # type: ignore[no-untyped-call]
    return remember_sharding(local, MANUAL)


def disable_manual_sharding(
    t: Tensor, partition_spec: PartitionSpec, full_shape: Sequence[int], *, mesh: Mesh | None = None
) -> Tensor:
    """The tensor of which the workers have these shards; the reverse of :func:`enable_manual_sharding`.

    Args:
        t: stands for each worker's shard.
        partition_spec, mesh: how the whole tensor is cut.
        full_shape: of the whole tensor.

    Raises:
        RuntimeError: ``t`` is data, and no result of operations on shards; or no shard of such a tensor.
    """
    mesh = _given(mesh)
    spec, full_shape = tuple(partition_spec), tuple(full_shape)
    check_length(spec, len(full_shape))
    mark_manual_sharding(t)
    shard = mesh.get_op_sharding(spec).shard_shape(full_shape)
    if tuple(t.shape) != shard:
        raise RuntimeError(
            f"Input tensor is not manual sharded: a shard of {list(full_shape)} cut by {spec} has the shape "
            f"{list(shard)}, and this is {list(t.shape)}"
        )
    return whole_of(t, full_shape, mesh.layout(spec, full_shape))


def whole_of(part: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """Return the tensor of this shape and layout whose shards are represented by ``part``."""
    whole: Tensor = _FromLocal.apply(part, shape, layout)  # type: ignore[no-untyped-call]
    return remember_sharding(whole, OpSharding.of_layout(layout, len(shape)))


def mark_manual_sharding(t: Tensor) -> Tensor:
    """Declare that ``t`` represents each worker's part.

    Raises:
        RuntimeError: it is data.
    """
    value = alias_of(t).value
    if value is not None and value.data is not None:
        raise RuntimeError("Marking any data tensors as manual is not supported")
    return remember_sharding(t, MANUAL)


def _given(mesh: Mesh | None) -> Mesh:
    mesh = get_global_mesh() if mesh is None else mesh
    if mesh is None:
        raise ValueError("no mesh is given and no global mesh is set: call spmd.set_global_mesh(mesh)")
    return mesh


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.shape, ctx.layout = tuple(t.shape), value_layout(t)
        return to_local(t)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return from_local(gradients[0], ctx.shape, ctx.layout)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
        ctx.layout = layout
        return from_local(t, shape, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return to_local(redistributed(gradients[0], ctx.layout)), None, None
