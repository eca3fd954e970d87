"""Stands in for ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

import logging

from dist_optim import DistributedOptimizer
from farcall.compat import torch_autograd as dist_autograd
from farcall.compat import torch_rpc as rpc
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rref import RRef

__all__ = ["DistributedOptimizer"]

_LENT = (RRef, dist_autograd, rpc)

logger = logging.getLogger("dist_optim")

__getattr__ = without_counterpart("torch.distributed.optim.optimizer")
