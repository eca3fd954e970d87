"""What a tensor on the logical device can tell of its shards.

Every such tensor has these properties, results of operations included; :class:`ShardedTensor` stands for them
in ``isinstance``. There is no second object around a tensor.
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
    """A snapshot of what one worker holds of a tensor.

    Attributes:
        data: on the CPU, as large as any shard of the tensor; zeros after its end.
        indices: the elements of the tensor that it has, a slice for each dimension, without padding;
            ``Ellipsis`` if it has all.
        shard_device: the worker, ``"CPU:3"``.
        replica_id: its place among the workers that hold the same.
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
    """A tensor on the logical device that is cut, or of which somebody said how it lies.

    These are plain tensors: ``mark_sharding`` returns the tensor that it was given. What is listed here, all
    tensors on the device have.

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
        """The tensor."""
        return self  # type: ignore[return-value]

    @property
    def sharding_spec(self) -> str:
        """How it is cut: ``{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}``, ``{replicated}``,
        ``{manual}``, or empty where nobody has said and every worker holds all.
        """
        return marks.sharding_spec(self)  # type: ignore[arg-type]

    @property
    def sharding_type(self) -> ShardingType:
        """The kind of sharding."""
        return marks.op_sharding(self).type  # type: ignore[arg-type]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """DTensor's placements, one for each dimension of the mesh it was marked on; of what was never
        marked, for each dimension of the engine's mesh, and none where every worker holds all.
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
        """The sizes of the mesh that ``placements`` are of; ``()`` where every worker holds all and nobody
        has said so.
        """
        t: Tensor = self  # type: ignore[assignment]
        mark = _valid_mark(t)
        if mark is not None and mark.mesh is not None:
            return mark.mesh.mesh_shape
        mesh = engine.value_layout(t).mesh
        return () if mesh is None else tuple(mesh.shape)

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec it was marked with; of what was never marked, one that says the same, with numbers."""
        t: Tensor = self  # type: ignore[assignment]
        mark = _valid_mark(t)
        if mark is not None and mark.mesh is not None:
            return mark.spec
        return spec_of(t.dim(), engine.value_layout(t).placements)

    def to_local(self) -> Tensor:
        """The tensor: the driver has no other part of it. Workers' parts are ``local_shards``."""
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
        """What the workers hold, in the order of their numbers."""
        t: Tensor = self  # type: ignore[assignment]
        sharding = marks.op_sharding(t)
        return [
            Shard(_padded(part, sharding.shard_shape(t.shape)), *_place(sharding, t.shape, number))
            for number, part in enumerate(engine.local_parts(t))
        ]

    def load_local_shards_(self, shards: Sequence[Shard]) -> None:
        """Give every worker its shard anew.

        Args:
            shards: one for each worker, in order; ``data`` is as large as in ``local_shards``.

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
    """Give the class of the logical device's tensors these properties."""
    for name, value in vars(ShardedTensor).items():
        if not name.startswith("_"):
            setattr(tensors, name, value)


def _valid_mark(t: Tensor) -> marks.Mark | None:
    """What was said of a tensor, if that is how it lies."""
    mark = marks.mark_of(t)
    return mark if mark is not None and mark.sharding == marks.op_sharding(t) else None


def _padded(part: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(part.shape) == tuple(shape):
        return part
    padded = torch.zeros(shape, dtype=part.dtype)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded


def _place(
    sharding: OpSharding, shape: Sequence[int], number: int
) -> tuple[list[slice] | EllipsisType, str, int]:
    indices = list(sharding.indices(shape, number)) if sharding.tiles else ...
    return indices, f"CPU:{number}", sharding.replica_id(number)
