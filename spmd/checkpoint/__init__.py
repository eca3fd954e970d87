"""Checkpoints of tensors on the logical device, in the format of ``torch.distributed.checkpoint``.

Names and meanings are those of PyTorch/XLA's ``distributed_checkpoint``.

Example::

    manager = CheckpointManager("checkpoints", save_interval=100, max_to_keep=3)
    if steps := manager.all_steps():
        prime_optimizer(optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        manager.restore(max(steps), state)
"""

from __future__ import annotations

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner
from spmd.checkpoint.priming import prime_optimizer

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
