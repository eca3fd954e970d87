"""Optimizers for parameters that live on many workers.

Example::

    with dist_autograd.context() as context_id:
        loss = loss_fn(model(x), y)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
"""

from __future__ import annotations

import farcall_guard

farcall_guard.check("rpc", "rref", "dist_autograd")

from dist_optim.lr_scheduler import DistributedLRScheduler
from dist_optim.optimizer import DistributedOptimizer

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]
