"""``torch_xla._XLAC``: how a tensor is cut, which programs ask its binding for."""

from __future__ import annotations

from torch import Tensor

from spmd.sharding.marks import is_marked, op_sharding, sharding_spec
from spmd.sharding.op_sharding import OpSharding, ShardingType

__all__ = ["OpSharding", "_get_xla_sharding_spec", "_get_xla_sharding_type"]


def _get_xla_sharding_spec(t: Tensor) -> str:
    return sharding_spec(t)


def _get_xla_sharding_type(t: Tensor) -> ShardingType | None:
    return op_sharding(t).type if is_marked(t) else None
