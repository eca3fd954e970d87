"""Optimizers for parameters that live on many workers.

Example::

    with dist_autograd.context() as context_id:
        loss = loss_fn(model(x), y)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
"""

from __future__ import annotations

from pathlib import Path

import rpc

_found = getattr(rpc, "__file__", None) or "a folder without a file"
if Path(_found).parent.parent != Path(__file__).parent.parent:
    raise ImportError(
        f"'import rpc' finds {_found} in place of farcall's own package, which stands beside "
        f"{Path(__file__).parent}: rename that file or folder, or start Python elsewhere"
    )

from dist_optim.lr_scheduler import DistributedLRScheduler
from dist_optim.optimizer import DistributedOptimizer

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]
