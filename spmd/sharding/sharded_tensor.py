"""The properties of tensors on the logical device that describe their shards.

Every such tensor has these properties, including results of operations; :class:`ShardedTensor` represents
them in ``isinstance``. There is no wrapper object around a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from spmd.engine import api as engine
from spmd.sharding import marks
from spmd.sharding.distribute import redistribute, spec_of
from spmd.sharding.mesh import Mesh
from spmd.sharding.op_sharding import OpSharding, ShardingType
from spmd.sharding.partition_spec import PartitionSpec, resolve

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Shard", "ShardedTensor", "install"]


class Shard:
    """A snapshot of one worker's part of a tensor.

    Attributes:
        data: tensor on the CPU with the size of the largest shard, padded with zeros.
        indices: the elements of the tensor that it contains, a slice for each dimension, without padding;
            ``Ellipsis`` if it contains all.
        shard_device: the worker, ``"CPU:3"``.
        replica_id: its position among the workers that hold the same.
    """

    def __init__(
        self, data: Tensor, indices: list[slice] | EllipsisType, shard_device: str, replica_id: int
    ) -> None:
        self.data, self.indices = data, indices
        self.shard_device, self.replica_id = shard_device, replica_id

    @property
    def unpadded_data(self) -> Tensor:
        """``data`` without padding: a view, which can also be assigned to."""
        return self.data[self._inside()]

    @unpadded_data.setter
    def unpadded_data(self, value: Tensor) -> None:
        self.data[self._inside()] = value

    def _inside(self) -> Any:
        if isinstance(self.indices, EllipsisType):
            return ...
        return tuple(slice(0, each.stop - each.start) for each in self.indices)

    def __repr__(self) -> str:
        return (
            f"Shard({self.shard_device}, indices={self.indices}, replica_id={self.replica_id}, "
            f"data={self.data})"
        )


class _AnyMarked(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return marks.is_marked(instance)


class ShardedTensor(metaclass=_AnyMarked):
    """A tensor on the logical device that is sharded, or whose sharding was specified.

    These are plain tensors: ``mark_sharding`` returns the tensor that it was given. All tensors on the device
    have the members listed here.

    Example::

        t = torch.arange(6.0).to(spmd.device())
        spmd.mark_sharding(t, spmd.get_1d_mesh(), (0,))
        isinstance(t, spmd.ShardedTensor)                  # True
        [shard.indices for shard in t.local_shards]        # with 4 workers: 0:2, 2:4, 4:6, 6:6
    """

    def __new__(cls, t: Tensor) -> Tensor:  # type: ignore[misc]
        return t

    @property
    def global_tensor(self) -> Tensor:
        """The tensor itself."""
        return self  # type: ignore[return-value]

    @property
    def sharding_spec(self) -> str:
        """Its sharding: ``{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}``, ``{replicated}``, ``{manual}``,
        or empty if none was specified and every worker holds the whole tensor.
        """
        return marks.sharding_spec(self)  # type: ignore[arg-type]

    @property
    def sharding_type(self) -> ShardingType:
        """The kind of sharding."""
        return marks.op_sharding(self).type  # type: ignore[arg-type]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """DTensor's placements, one for each dimension of the mesh that it was marked with; without a mark,
        for each dimension of the engine's mesh, and empty if every worker holds the whole tensor.
        """
        t: Tensor = self  # type: ignore[assignment]
        mark = _valid_mark(t)
        if mark is None or mark.mesh is None:
            return engine.value_layout(t).placements
        found: list[Placement] = [Replicate()] * len(mark.mesh.mesh_shape)
        for dim, axes in enumerate(resolve(mark.spec, mark.mesh.axis_names, len(found))):
            for axis in axes:
                found[axis] = ShardPlacement(dim)
        return tuple(found)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the mesh of ``placements``; ``()`` if every worker holds the whole tensor and no
        sharding was specified.
        """
        t: Tensor = self  # type: ignore[assignment]
        mark = _valid_mark(t)
        if mark is not None and mark.mesh is not None:
            return mark.mesh.mesh_shape
        mesh = engine.value_layout(t).mesh
        return () if mesh is None else tuple(mesh.shape)

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec that it was marked with; without a mark an equivalent one, with numbers."""
        t: Tensor = self  # type: ignore[assignment]
        mark = _valid_mark(t)
        if mark is not None and mark.mesh is not None:
            return mark.spec
        return spec_of(t.dim(), engine.value_layout(t).placements)

    def to_local(self) -> Tensor:
        """Return the tensor: the driver has no local part of it. The workers' parts are ``local_shards``."""
        return self  # type: ignore[return-value]

    def redistribute(
        self,
        device_mesh: Mesh | DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> Tensor:
        """See :func:`spmd.sharding.distribute.redistribute`."""
        return redistribute(self, device_mesh, placements, async_op=async_op)  # type: ignore[arg-type]

    @property
    def local_shards(self) -> list[Shard]:
        """The workers' parts, in the order of their numbers."""
        t: Tensor = self  # type: ignore[assignment]
        sharding = marks.op_sharding(t)
        return [
            Shard(_padded(part, sharding.shard_shape(t.shape)), *_place(sharding, t.shape, number))
            for number, part in enumerate(engine.local_parts(t))
        ]

    def load_local_shards_(self, shards: Sequence[Shard]) -> None:
        """Replace every worker's shard.

        Args:
            shards: one for each worker, in order; ``data`` has the same size as in ``local_shards``.

        Raises:
            RuntimeError: too few or too many, of another shape, or the tensor is replicated.
        """
        t: Tensor = self  # type: ignore[assignment]
        sharding = marks.op_sharding(t)
        workers = engine.workers_count()
        if not sharding.tiles:
            raise RuntimeError(
                "shards cannot be loaded into a replicated tensor: every worker holds all of it. Use "
                "t.copy_(tensor.to(t.device))"
            )
        if len(shards) != workers:
            raise RuntimeError(f"there are {len(shards)} shards for {workers} workers: each needs one")
        shape = sharding.shard_shape(t.shape)
        wrong = [number for number, shard in enumerate(shards) if tuple(shard.data.shape) != shape]
        if wrong:
            raise RuntimeError(
                f"shard {wrong[0]} has the shape {list(shards[wrong[0]].data.shape)}; shards of this tensor "
                f"have {list(shape)}, padding included"
            )
        inside = [
            tuple(slice(0, each.stop - each.start) for each in sharding.indices(t.shape, number))
            for number in range(workers)
        ]
        engine.load_local_parts(
            t, [shard.data[part].to(t.dtype, copy=True) for shard, part in zip(shards, inside, strict=True)]
        )


def install(tensors: type) -> None:
    """Add these properties to the class of the logical device's tensors."""
    for name, value in vars(ShardedTensor).items():
        if not name.startswith("_"):
            setattr(tensors, name, value)


def _valid_mark(t: Tensor) -> marks.Mark | None:
    """Return a tensor's mark, if it still describes its layout."""
    mark = marks.mark_of(t)
    return mark if mark is not None and mark.sharding == marks.op_sharding(t) else None


def _padded(part: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(part.shape) == tuple(shape):
        return part
    padded = torch.zeros(shape, dtype=part.dtype, device=part.device)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded


def _place(
    sharding: OpSharding, shape: Sequence[int], number: int
) -> tuple[list[slice] | EllipsisType, str, int]:
    indices = list(sharding.indices(shape, number)) if sharding.tiles else ...
    return indices, f"CPU:{number}", sharding.replica_id(number)
