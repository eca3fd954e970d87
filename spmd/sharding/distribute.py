"""DTensor's interface for sharding: placements, one for each dimension of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine import api as engine
from spmd.engine.driver.start import device
from spmd.sharding.marks import LaidOut, is_marked, mark_of, mark_sharding, op_sharding, remember
from spmd.sharding.mesh import Mesh, check_mesh
from spmd.sharding.op_sharding import ShardingType
from spmd.sharding.partition_spec import PartitionSpec
from spmd.sharding.placing import place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "distribute_module",
    "distribute_tensor",
    "mesh_of",
    "partition_spec_of",
    "redistribute",
    "spec_of",
]


def mesh_of(mesh: Mesh | DeviceMesh) -> Mesh:
    """Return the mesh of a ``DeviceMesh`` whose ranks are the workers' numbers."""
    if isinstance(mesh, Mesh) or not hasattr(mesh, "mesh_dim_names"):
        check_mesh(mesh)
        return mesh  # type: ignore[return-value]
    numbers = mesh.mesh.flatten().tolist()
    return Mesh(numbers, tuple(mesh.mesh.shape), mesh.mesh_dim_names)


def partition_spec_of(dims: int, placements: Sequence[Placement]) -> PartitionSpec:
    """The spec that says for a tensor of ``dims`` dimensions what these placements say.

    Raises:
        ValueError: one of them is neither ``Shard`` nor ``Replicate``.
        IndexError: a tensor has no such dimension.

    Example::

        >>> partition_spec_of(2, [Shard(0), Replicate(), Shard(0)])
        ((0, 2), None)
    """
    for placement in placements:
        if isinstance(placement, Shard):
            if not -dims <= placement.dim < dims:
                raise IndexError(f"{placement} is out of range for a tensor of {dims} dimensions")
        elif not isinstance(placement, Replicate):
            raise ValueError(f"Unsupported placement type: {type(placement).__name__}")
    return spec_of(dims, placements)


def spec_of(dims: int, placements: Sequence[Placement]) -> PartitionSpec:
    """Like ``partition_spec_of``, for any placements: those other than ``Shard`` are ignored."""
    cut_by: list[list[int]] = [[] for _ in range(dims)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            cut_by[placement.dim].append(axis)
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in cut_by)


def distribute_tensor(
    tensor: Tensor, device_mesh: Mesh | DeviceMesh, placements: Sequence[Placement] | None = None
) -> Tensor:
    """Return a sharded tensor on the logical device.

    Args:
        tensor: the whole tensor, on the CPU or on the logical device.
        device_mesh: mesh of all workers: a :class:`Mesh`, or a ``DeviceMesh`` of their numbers.
        placements: ``Shard`` or ``Replicate`` for each dimension of the mesh; None: replicated.

    Raises:
        ValueError: ``tensor`` is a DTensor, or is sharded already, or a placement is of another kind.
        AssertionError: the number of placements differs from the number of mesh dimensions.

    Example::

        distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Replicate()]).sharding_spec
    """
    mesh = mesh_of(device_mesh)
    if placements is None:
        placements = [Replicate()] * len(mesh.mesh_shape)
    if len(placements) != len(mesh.mesh_shape):
        raise AssertionError(
            f"placements must have one entry for each of {len(mesh.mesh_shape)} mesh dimensions, got "
            f"{len(placements)}"
        )
    spec = partition_spec_of(tensor.dim(), placements)
    if type(tensor).__name__ == "DTensor":
        raise ValueError("Cannot distribute a DTensor: the input tensor must be global.")
    if is_marked(tensor) and op_sharding(tensor).type is not ShardingType.REPLICATED:
        raise ValueError(
            f"the tensor is cut already, as {op_sharding(tensor)}: call spmd.clear_sharding first, or "
            "redistribute"
        )
    moved = tensor if engine.is_logical(tensor) else tensor.detach().to(device())
    if moved is not tensor:
        moved = moved.requires_grad_(tensor.requires_grad)
    return mark_sharding(moved, mesh, spec)


def distribute_module(
    module: nn.Module,
    device_mesh: Mesh | DeviceMesh,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Move a module to the logical device and shard its parameters as a function specifies; changed in place.

    Args:
        device_mesh: as in :func:`distribute_tensor`.
        partition_fn: called with the name of each submodule, the submodule and the mesh; it marks parameters
            with :func:`mark_sharding` or replaces them by ``nn.Parameter(distribute_tensor(...))``. Other
            parameters are replicated.
        input_fn, output_fn: called with the module, its inputs or outputs, and the mesh, before and after
            forward; their return values replace the inputs or outputs, unless None.

    Returns:
        ``module``.
    """
    place(module)
    for name, each in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, each, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda module, inputs: input_fn(module, inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda module, _, output: output_fn(module, output, device_mesh))
    return module


def redistribute(
    t: Tensor,
    device_mesh: Mesh | DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
) -> Tensor:
    """Return a tensor with the same value and another sharding; gradients are returned in the old one.

    Args:
        device_mesh: as in :func:`distribute_tensor`; None for the mesh of ``t``.
        placements: as in :func:`distribute_tensor`.
        async_op: ignored: operations on this device never wait.

    Raises:
        ValueError: not one placement for each dimension of the mesh.
        IndexError: ``Shard`` of a dimension that ``t`` has not.
        NotImplementedError: ``Partial``.
    """
    if placements is None:
        raise ValueError("redistribute needs placements, one for each dimension of the mesh")
    if any(isinstance(each, Partial) for each in placements):
        raise NotImplementedError("a tensor cannot be made into partial sums: use Shard or Replicate")
    mesh = _mesh_under(t) if device_mesh is None else mesh_of(device_mesh)
    if len(placements) != len(mesh.mesh_shape):
        raise ValueError(
            f"the mesh has {len(mesh.mesh_shape)} dimensions, and there are {len(placements)} placements"
        )
    spec = partition_spec_of(t.dim(), placements)
    layout, before = mesh.layout(spec, tuple(t.shape)), engine.value_layout(t)
    moved: Tensor = LaidOut.apply(t, layout, before)  # type: ignore[no-untyped-call]
    return remember(moved, mesh, spec)


def _mesh_under(t: Tensor) -> Mesh:
    mark = mark_of(t)
    if mark is not None and mark.mesh is not None:
        return mark.mesh
    key = engine.value_layout(t).mesh
    if key is None:
        raise ValueError("a replicated tensor is on no mesh: say on which it is to be cut")
    return Mesh(key.devices, key.shape)
