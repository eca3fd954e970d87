"""Marks: the user's specification of a tensor's sharding.

A mark is kept with the tensor object, and is valid until it is cleared; the engine knows the layout of every
tensor, marked or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd.engine import api as engine
from spmd.engine.driver.logical_tensor import alias_of, know_gradient
from spmd.engine.program.program import REPLICATED, Layout
from spmd.sharding.mesh import Mesh, check_mesh
from spmd.sharding.op_sharding import MANUAL, OpSharding, ShardingType
from spmd.sharding.partition_spec import PartitionSpec, check_length

__all__ = [
    "LaidOut",
    "Mark",
    "ShardingSpec",
    "annotate_custom_sharding",
    "clear_sharding",
    "is_marked",
    "mark_of",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "op_sharding",
    "remember",
    "remember_sharding",
    "sharding_spec",
    "wrap_if_sharded",
]

_MARK: Final = "_spmd_mark"


def mark_sharding(t: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
    """Shard a tensor over a mesh, in place: a parameter stays the same parameter.

    Results that have not been computed yet may be marked any number of times. Data, such as parameters, may
    be marked again if it was replicated, or in the same way; otherwise call :func:`clear_sharding` first.

    Args:
        t: a tensor on the logical device.
        mesh: mesh of all workers.
        partition_spec: for each dimension of ``t``: the axis of the mesh that shards it, by name or number; a
            tuple of axes, the first the slowest to change; or None for a dimension that is not sharded.
            ``()`` for a scalar. The tensor is replicated along axes that are not named.

    Returns:
        ``t``.

    Raises:
        RuntimeError: there is no logical device, or ``t`` is not on it, or is sharded in another way, or
            represents workers' parts.
        AssertionError, ValueError: the spec does not fit the tensor or the mesh.
        TypeError: an argument has another type.

    Example::

        mesh = spmd.Mesh(range(4), (2, 2), ("data", "model"))
        spmd.mark_sharding(linear.weight, mesh, ("model", None))
        spmd.mark_sharding(batch, mesh, (("data", "model"), None))
    """
    sharding = _checked(t, mesh, partition_spec)
    before = mark_of(t)
    if (
        before is not None
        and before.is_data
        and before.sharding != sharding
        and before.sharding.type is not ShardingType.REPLICATED
    ):
        raise RuntimeError(
            f"Existing annotation must be cleared first: this tensor is cut as {before.sharding}, and is to "
            f"be cut as {sharding}. Call spmd.clear_sharding(t), or spmd.annotate_custom_sharding"
        )
    return _mark(t, mesh, tuple(partition_spec), sharding)


def annotate_custom_sharding(t: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
    """Like :func:`mark_sharding`, whatever the tensor's previous mark."""
    return _mark(t, mesh, tuple(partition_spec), _checked(t, mesh, partition_spec))


def mark_sharding_with_gradients(t: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
    """Return a tensor with the same value, sharded over a mesh; its gradient is sharded in the same way.

    Arguments and errors are those of :func:`mark_sharding`; ``t`` itself is not changed.
    """
    _checked(t, mesh, partition_spec)
    layout = mesh.layout(tuple(partition_spec), t.shape)
    marked: Tensor = LaidOut.apply(t, layout, layout)  # type: ignore[no-untyped-call]
    return remember(marked, mesh, tuple(partition_spec))


class LaidOut(torch.autograd.Function):
    """A tensor with the same value and another layout; its gradient is returned in the layout ``back``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout, back: Layout) -> Tensor:
        ctx.back = back
        return engine.redistributed(t, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return engine.redistributed(gradient, ctx.back), None, None


def clear_sharding(t: Tensor) -> Tensor:
    """Remove a mark, in place; all workers then hold the whole tensor. Returns ``t``."""
    if engine.is_logical(t):
        engine.constrain(t, REPLICATED)
        if hasattr(t, _MARK):
            delattr(t, _MARK)
    return t


def is_marked(t: Any) -> bool:
    """Whether a tensor's sharding was specified, or it is sharded."""
    return engine.is_logical(t) and (hasattr(t, _MARK) or bool(op_sharding(t).tiles))


def wrap_if_sharded(x: Any) -> Any:
    """Return ``x``: every tensor on the logical device has its shards. :func:`is_marked` tells which are
    sharded.
    """
    return x


def op_sharding(t: Tensor) -> OpSharding:
    """Return the sharding of a tensor on the logical device."""
    mark = mark_of(t)
    if mark is not None and mark.sharding.type is ShardingType.MANUAL:
        return MANUAL
    return OpSharding.of_layout(engine.value_layout(t), t.dim())


def sharding_spec(t: Tensor) -> str:
    """Return a tensor's sharding as text; see :class:`OpSharding`. Empty if none was specified and it is
    whole.
    """
    return str(op_sharding(t)) if is_marked(t) else ""


@dataclass(frozen=True)
class Mark:
    """The specified sharding of a tensor.

    Attributes:
        sharding: the sharding.
        mesh, spec: as specified; None if shards were combined or taken apart by hand.
        is_data: whether it was given, and not computed: a parameter, or a tensor from the CPU.
    """

    sharding: OpSharding
    mesh: Mesh | None
    spec: PartitionSpec
    is_data: bool

    def __deepcopy__(self, memo: object) -> Mark:
        return self


def mark_of(t: Tensor) -> Mark | None:
    """Return the latest mark of a tensor."""
    return getattr(t, _MARK, None)


def remember(computed: Tensor, mesh: Mesh, spec: PartitionSpec) -> Tensor:
    """Record the mark of a result, which has that layout already."""
    setattr(computed, _MARK, Mark(mesh.get_op_sharding(spec), mesh, spec, is_data=False))
    return computed


def remember_sharding(computed: Tensor, sharding: OpSharding) -> Tensor:
    """Like ``remember``, without a spec. ``MANUAL``: only the program knows what the shards are."""
    setattr(computed, _MARK, Mark(sharding, None, (), is_data=False))
    return computed


def _mark(t: Tensor, mesh: Mesh, spec: PartitionSpec, sharding: OpSharding) -> Tensor:
    value = alias_of(t).value
    before = mark_of(t)
    is_data = (
        (t.is_leaf and t.requires_grad)
        or (value is not None and value.data is not None)
        or (before is not None and before.is_data)
    )
    engine.constrain(t, mesh.layout(spec, t.shape))
    setattr(t, _MARK, Mark(sharding, mesh, spec, is_data))
    if t.is_leaf and t.requires_grad:
        know_gradient(t)
    return t


def _checked(t: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> OpSharding:
    workers = engine.workers_count()
    check_mesh(mesh)
    if not isinstance(t, Tensor):
        raise TypeError(f"expected a tensor, got {type(t).__name__}: of a module, mark the parameters")
    if not engine.is_logical(t):
        raise RuntimeError(f"a tensor on {t.device} cannot be marked: move it with .to(spmd.device()) first")
    if mesh.size() != workers:
        raise AssertionError(
            f"{mesh.mesh_shape} is not mappable over {workers} devices: a mesh has all workers"
        )
    check_length(partition_spec, t.dim())
    mark = mark_of(t)
    if mark is not None and mark.sharding.type is ShardingType.MANUAL:
        raise RuntimeError(
            "this tensor stands for each worker's part, and has no whole that could be cut: call "
            "spmd.disable_manual_sharding first"
        )
    return mesh.get_op_sharding(tuple(partition_spec))


@dataclass
class ShardingSpec:
    """The sharding of tensors with a number of dimensions, for loaders.

    Attributes:
        mesh, partition_spec: as in :func:`mark_sharding`.
        minibatch: whether the first dimension must be a multiple of the number of workers.

    Example::

        loader = spmd.DeviceLoader(loader, spmd.device(), input_sharding=ShardingSpec(mesh, ("data", None)))
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def can_apply(self, t: Tensor) -> bool:
        """Whether a tensor has as many dimensions as the spec."""
        return t.dim() == len(self.partition_spec)

    def xla_spec(self, t: Tensor) -> OpSharding | None:
        """Return the sharding of a tensor; None if the spec does not fit it.

        Raises:
            RuntimeError: ``minibatch``, and the first dimension is no multiple of the number of workers.
        """
        if not self.can_apply(t):
            return None
        workers = self.mesh.size()
        if self.minibatch and t.dim() and t.shape[0] % workers:
            raise RuntimeError(
                "When minibatch is configured, the per-host batch size must be divisible by local runtime "
                f"device count. Per host input data shape {list(t.shape)}, {workers} devices"
            )
        return self.mesh.get_op_sharding(tuple(self.partition_spec))

    def apply(self, t: Tensor) -> None:
        """Mark a tensor on the logical device."""
        self.xla_spec(t)
        mark_sharding(t, self.mesh, self.partition_spec)
