"""``XLAShardedTensor``'s view of itself as PyTorch's DTensor: a ``DTensorSpec`` of a tensor's shards."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from spmd.engine import api as engine
from spmd.engine.driver.logical_tensor import LogicalTensor
from spmd.sharding.marks import mark_of
from spmd.sharding.sharded_tensor import ShardedTensor
from spmd.torch_internals import DTensorSpec, TensorMeta

__all__ = ["give_back", "lend"]

_CACHE: Final = "_xla_spec"
_placements: Final[Any] = vars(ShardedTensor)["placements"]


def lend() -> None:
    """Give tensors on the device ``_spec`` and its cache, until :func:`give_back`. Twice is once."""
    given: Any = LogicalTensor
    given._spec, given._cached_spec = property(_spec), property(_cached)
    given.placements, given.invalidate_spec_cache = property(_placements_of), _invalidate


def give_back() -> None:
    """Undo :func:`lend`."""
    given: Any = LogicalTensor
    if hasattr(given, "_spec"):
        del given._spec, given._cached_spec, given.invalidate_spec_cache
        given.placements = _placements


def _spec(t: Any) -> DTensorSpec:
    """Placements on a mesh of the device's workers; made anew when the tensor is cut otherwise."""
    placements = _placements.fget(t) or (Replicate(),)
    sizes = t.mesh_shape or (engine.workers_count(),)
    known: DTensorSpec | None = getattr(t, _CACHE, None)
    if known is not None and known.placements == placements and tuple(known.mesh.shape) == sizes:
        return known
    mark = mark_of(t)
    devices = range(engine.workers_count()) if mark is None or mark.mesh is None else mark.mesh.device_ids
    ids = torch.tensor(list(devices)).view(sizes)
    mesh = DeviceMesh("xla", ids, _init_backend=False, _rank=int(ids.flatten()[0]))
    made = DTensorSpec(mesh, placements, TensorMeta(t.shape, t.stride(), t.dtype))
    setattr(t, _CACHE, made)
    return made


def _placements_of(t: Any) -> tuple[Placement, ...]:
    """As without XLA's names; the spec is kept."""
    _spec(t)
    found: tuple[Placement, ...] = _placements.fget(t)
    return found


def _cached(t: Tensor) -> DTensorSpec | None:
    """The spec that was made when it, or ``placements``, was asked for."""
    return getattr(t, _CACHE, None)


def _invalidate(t: Tensor) -> None:
    """Forget it."""
    setattr(t, _CACHE, None)
