"""``torch_xla.experimental.distributed_checkpoint._helpers``: state on the CPU, shard by shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spmd.checkpoint.planners import CpuShards as _CpuShards
from spmd.checkpoint.planners import sharded_cpu_state_dict as _sharded_cpu_state_dict
from spmd.engine.api import is_logical
from spmd.sharding.marks import op_sharding

__all__ = ["_CpuShards", "_is_sharded_tensor", "_sharded_cpu_state_dict"]


def _is_sharded_tensor(x: Any) -> bool:
    """Whether workers hold different parts of it."""
    return isinstance(x, Tensor) and is_logical(x) and bool(op_sharding(x).tiles)
