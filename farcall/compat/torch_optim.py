"""Stands in for ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

from dist_optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
