"""``torch_xla.distributed.spmd``: XLA's names for our marks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from farcall.compat.torch_xla import runtime as _runtime
from farcall.compat.torch_xla.fsdp_utils import apply_xla_patch_to_nn_linear
from rpc.runtime.torch_internals import pytree
from spmd.engine import api as _engine
from spmd.engine.driver import start as _start
from spmd.engine.driver.blocks import has_blocks
from spmd.engine.program.program import Layout
from spmd.sharding.auto import auto_policy
from spmd.sharding.distribute import distribute_module as xla_distribute_module
from spmd.sharding.distribute import distribute_tensor as xla_distribute_tensor
from spmd.sharding.distribute import mesh_of as convert_to_xla_mesh
from spmd.sharding.distribute import partition_spec_of
from spmd.sharding.hybrid_mesh import HybridMesh as _HybridMesh
from spmd.sharding.manual import disable_manual_sharding, enable_manual_sharding
from spmd.sharding.manual import mark_manual_sharding as _mark_manual_sharding
from spmd.sharding.marks import (
    ShardingSpec,
    annotate_custom_sharding,
    clear_sharding,
    mark_sharding_with_gradients,
    wrap_if_sharded,
)
from spmd.sharding.marks import mark_sharding as _mark_sharding
from spmd.sharding.mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from spmd.sharding.op_sharding import ShardingType
from spmd.sharding.partition_spec import PartitionSpec
from spmd.sharding.sharded_tensor import Shard as XLAShard
from spmd.sharding.sharded_tensor import ShardedTensor

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]


def mark_sharding(t: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
    """Like ``spmd.mark_sharding``; data that is still in this process is sent to the workers at once, as
    in PyTorch/XLA.
    """
    marked = _mark_sharding(t, mesh, partition_spec)
    _engine.upload_data(marked)
    return marked


class MarkShardingFunction:
    """:func:`mark_sharding_with_gradients`, called as the autograd function that theirs is."""

    @staticmethod
    def apply(t: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
        """A tensor of the same value, cut over a mesh; its gradient is cut in the same way."""
        return mark_sharding_with_gradients(t, mesh, partition_spec)


EinsumLinear = nn.Linear
"""Linear layers keep the dimensions of their inputs here."""


class HybridMesh(_HybridMesh):
    """Ours, of the workers that ``torch_xla.runtime`` tells of."""

    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        runtime: Any = sys.modules.get("torch_xla.runtime", _runtime)
        attributes = runtime.global_runtime_device_attributes()
        super().__init__(ici_mesh_shape, dcn_mesh_shape, axis_names, device_attributes=attributes)


def convert_to_xla_partition_spec(tensor: Tensor, placement_spec: Sequence[Any]) -> Any:
    """The spec of placements."""
    return partition_spec_of(tensor.dim(), placement_spec)


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Nothing: gradients are not fused into one another here."""


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Give pairs of tensors the same layout, in place: that of the tensor in ``a`` if it is sharded,
    otherwise that of its counterpart in ``b``.

    Args:
        a, b: tensors on the device, or trees of them with the same structure and shapes.

    Returns:
        Both. Gradients go through, and are laid out as they come.

    Raises:
        ValueError: their structures or shapes differ.
    """
    ones, structure = pytree.tree_flatten(a)
    others, other_structure = pytree.tree_flatten(b)
    shapes = [[tuple(each.shape) for each in leaves] for leaves in (ones, others)]
    if structure != other_structure or shapes[0] != shapes[1]:
        raise ValueError(
            f"expected two trees of one structure and with the same shapes, got {shapes[0]} and {shapes[1]}"
        )
    for one, other in zip(ones, others, strict=True):
        if (layout := _cut(one)) is not None:
            _engine.constrain(other, layout)
        elif (layout := _cut(other)) is not None:
            _engine.constrain(one, layout)
    return a, b


def _cut(t: Tensor) -> Layout | None:
    layout = _engine.value_layout(t)
    return layout if layout.mesh is not None and has_blocks(layout) else None


class XLAShardedTensor(ShardedTensor):
    """A sharded tensor, with the constructor of PyTorch/XLA's: a tensor, and its sharding."""

    def __new__(  # type: ignore[misc]
        cls, elem: Tensor, mesh_shape: Any = None, partition_spec: Any = None, *, requires_grad: bool = False
    ) -> Tensor:
        wrapped = wrap_as_sharded_tensor(elem, mesh_shape, partition_spec)
        return wrapped.detach().requires_grad_() if requires_grad else wrapped


def wrap_as_sharded_tensor(t: Tensor, mesh_shape: Any = None, partition_spec: Any = None) -> Tensor:
    """The tensor, on the device.

    Args:
        mesh_shape: a shape for all workers in order, or a mesh; None leaves the tensor as it is.
        partition_spec: how to cut it over that, in place of any earlier mark: a spec, or placements.
    """
    if not _engine.is_logical(t):
        t = t.detach().to(_start.device()).requires_grad_(t.requires_grad)
    if mesh_shape is None:
        return t
    mesh = (
        Mesh(range(_engine.workers_count()), tuple(mesh_shape))
        if isinstance(mesh_shape, (tuple, list))
        else convert_to_xla_mesh(mesh_shape)
    )
    if any(isinstance(each, Placement) for each in partition_spec):
        partition_spec = partition_spec_of(t.dim(), partition_spec)
    return annotate_custom_sharding(t, mesh, tuple(partition_spec))


def unwrap_sharded_tensor(t: Tensor) -> Tensor:
    """The tensor."""
    return t


def xla_patched_nn_linear_forward(m: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  theirs
    """Compute a linear layer."""
    return nn.functional.linear(input, m.weight, m.bias)


class XLAPatchedLinear:
    """A linear layer that keeps the dimensions of its input, as all do here."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  theirs
        """Compute the linear layer."""
        return nn.functional.linear(input, weight, bias)
