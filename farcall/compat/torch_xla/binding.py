"""``torch_xla._XLAC``: how a tensor is cut, and its parts, which programs ask its binding for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farcall.compat.torch_xla.metrics import metrics_report as _xla_metrics_report
from farcall.compat.torch_xla.preemption import (
    _activate_preemption_sync_manager,
    _deactivate_preemption_sync_manager,
    _ensure_xla_coordinator_initialized,
    _sync_point_reached,
)
from spmd.engine import api as engine
from spmd.engine.driver.current import engine as session
from spmd.engine.driver.logical_tensor import alias_of
from spmd.sharding import op_sharding as shardings
from spmd.sharding.manual import mark_manual_sharding, whole_of, worker_parts
from spmd.sharding.marks import is_marked, op_sharding, sharding_spec
from spmd.sharding.op_sharding import ShardingType

__all__ = [
    "OpSharding",
    "_activate_preemption_sync_manager",
    "_deactivate_preemption_sync_manager",
    "_ensure_xla_coordinator_initialized",
    "_get_graph_hash",
    "_get_xla_op_sharding",
    "_get_xla_sharding_spec",
    "_get_xla_sharding_specs",
    "_get_xla_sharding_type",
    "_get_xla_tensor_debug_info",
    "_global_tensor_from_cpu_shards",
    "_mark_manual_sharding",
    "_spmd_full_to_shard_shape",
    "_spmd_shard_to_full_shape",
    "_sync_point_reached",
    "_xla_get_auto_sharding",
    "_xla_metrics_report",
]


def OpSharding(  # noqa: N802  theirs
    tile_assignment: Any,
    group_assignment: Sequence[Any],
    replication_groups: Sequence[Any],
    sharding_type: int,
) -> shardings.OpSharding:
    """A sharding, made as theirs is.

    Args:
        tile_assignment: the workers' numbers, an array with a dimension for each of the tensor.
        group_assignment, replication_groups: of ``PARTIAL``, which is not made so.
        sharding_type: ``TILED``, ``REPLICATED`` or ``MANUAL``.

    Raises:
        ValueError: it is of another kind.
    """
    if sharding_type == ShardingType.TILED:
        devices = torch.tensor(tile_assignment)
        return shardings.OpSharding.tiled(devices.shape, devices.flatten().tolist())
    if sharding_type == ShardingType.REPLICATED:
        return shardings.WHOLE
    if sharding_type == ShardingType.MANUAL:
        return shardings.MANUAL
    raise ValueError(
        f"a sharding of the type {ShardingType(sharding_type).name} is not made so: use "
        "mesh.get_op_sharding(partition_spec)"
    )


def _get_xla_sharding_spec(t: Tensor) -> str:
    """Return a tensor's sharding; without a mark ``{replicated}`` once workers have it, and '' before."""
    if not engine.is_logical(t):
        return ""
    alias = alias_of(t)
    value = (alias.base or alias).value
    return sharding_spec(t) or ("{replicated}" if value is not None and value.remote is not None else "")


def _get_xla_sharding_specs(tensors: Sequence[Tensor]) -> list[str]:
    return [_get_xla_sharding_spec(t) for t in tensors]


def _get_xla_sharding_type(t: Tensor) -> ShardingType | None:
    return op_sharding(t).type if is_marked(t) else None


def _get_xla_op_sharding(t: Tensor) -> shardings.OpSharding | None:
    return op_sharding(t) if is_marked(t) else None


def _get_xla_tensor_debug_info(t: Tensor) -> str:
    """Where a tensor is, in lines such as theirs.

    Raises:
        RuntimeError: it is not on the device.
    """
    if not engine.is_logical(t):
        raise RuntimeError(f"Input tensor is not an XLA tensor: it is on {t.device}")
    value = alias_of(t).value
    is_here = value is not None and value.data is not None
    lines = [
        f"XLA Shape: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}",
        f"ShardingSpec: {sharding_spec(t) or (None if is_here else '{replicated}')}",
        "Device: SPMD:0",
    ]
    if is_here:
        lines += ["IR: None", "XLAData: None", f"Tensor on host: with size {list(t.shape)}"]
    elif value is not None and value.remote is not None:
        lines += [
            "IR: xla::device_data",
            "XLAData: XLAShardedData",
            f"  Data Device: SPMD:0\n  OpSharding: {_get_xla_sharding_spec(t)}",
            f"  NumShards: {engine.workers_count()}",
            "Tensor on host: None",
        ]
    else:
        lines += ["IR: recorded", "XLAData: None", "Tensor on host: None"]
    return "\n".join(lines)


def _get_graph_hash(tensors: Sequence[Tensor]) -> str:
    """Return a value that distinguishes programs for the workers, by their instructions and by
    auto-sharding.
    """
    recording = session().recorder.recording
    parts: list[object] = [_xla_get_auto_sharding(), os.environ.get("XLA_AUTO_SPMD_MESH", "")]
    parts += [(entry.operator, repr(entry.args)) for entry, _ in recording.operations]
    parts += [(tuple(t.shape), str(t.dtype), _get_xla_sharding_spec(t)) for t in tensors]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _xla_get_auto_sharding() -> bool:
    return session().planner is not None


def _mark_manual_sharding(t: Tensor, sharding: shardings.OpSharding | None = None) -> None:
    mark_manual_sharding(t)


def _spmd_full_to_shard_shape(t: Tensor) -> Tensor:
    """Return a tensor that represents each worker's part of a marked one."""
    if not is_marked(t):
        raise RuntimeError("Input tensor is not sharded: call mark_sharding first")
    return worker_parts(t)


def _spmd_shard_to_full_shape(
    t: Tensor, sharding: shardings.OpSharding, output_shape: Sequence[int], output_dtype: torch.dtype
) -> Tensor:
    """The tensor whose parts are said to be these."""
    if not is_marked(t) or op_sharding(t).type is not ShardingType.MANUAL:
        raise RuntimeError("Input tensor is not manual sharded: call _mark_manual_sharding first")
    return whole_of(t, tuple(output_shape), sharding.layout(output_shape)).to(output_dtype)


def _global_tensor_from_cpu_shards(
    shards: Sequence[Tensor], sharding: shardings.OpSharding, global_shape: Sequence[int] | None = None
) -> Tensor:
    """A tensor on the device made of its workers' parts.

    Args:
        shards: on the CPU, one for each worker, all of one shape.
        global_shape: of the whole, so that what is beyond it in the last parts is padding. Without it, parts
            have no padding.

    Raises:
        RuntimeError: their number or shapes do not fit.
    """
    workers = engine.workers_count()
    if len(shards) != workers:
        raise RuntimeError(f"there are {len(shards)} shards for {workers} workers: each needs one")
    part = tuple(shards[0].shape)
    tiles = sharding.tiles or (1,) * len(part)
    if global_shape is None:
        global_shape = [size * count for size, count in zip(part, tiles, strict=True)]
    fits = len(global_shape) == len(part) and sharding.shard_shape(global_shape) == part
    if not fits or any(tuple(each.shape) != part for each in shards):
        raise RuntimeError(
            f"shards of {[list(each.shape) for each in shards]} do not make a tensor of {list(global_shape)} "
            f"that is cut as {sharding}"
        )
    whole: Any = torch.empty(tuple(global_shape), dtype=shards[0].dtype)
    for worker, each in enumerate(shards):
        where = sharding.indices(global_shape, worker)
        whole[where] = each[tuple(slice(0, place.stop - place.start) for place in where)]
    return engine.uploaded_with(whole, sharding.layout(global_shape))
