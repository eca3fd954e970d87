"""``torch_xla.distributed.spmd.debugging``: tables of shards."""

from __future__ import annotations

from torch import Tensor

from spmd.sharding.marks import op_sharding
from spmd.sharding.visualize import visualize_sharding, visualize_tensor_sharding

__all__ = ["construct_v1_sharding_str", "visualize_sharding", "visualize_tensor_sharding"]


def construct_v1_sharding_str(t: Tensor) -> str:
    """How a tensor is cut, ``{devices=[2,1]0,1}``, as ``visualize_sharding`` takes it."""
    return str(op_sharding(t))
