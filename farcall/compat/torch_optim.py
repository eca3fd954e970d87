"""Stands in for ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

from dist_optim import DistributedOptimizer
from farcall.compat.torch_rpc.without_counterpart import without_counterpart

__all__ = ["DistributedOptimizer"]

__getattr__ = without_counterpart("torch.distributed.optim.optimizer")
