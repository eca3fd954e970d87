"""Fully sharded data parallelism: parameters, gradients and optimizer state sharded over all workers.

Names and meanings are those of PyTorch/XLA's FSDPv2.

Example::

    mesh = spmd.Mesh(range(n), (n, 1), ("fsdp", "model"))
    model = FSDPv2(Decoder(), mesh=mesh, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
"""

from __future__ import annotations

from spmd.fsdp.checkpointing import checkpoint_module
from spmd.fsdp.wrapper import FSDPv2, SpmdFullyShardedDataParallel

__all__ = ["FSDPv2", "SpmdFullyShardedDataParallel", "checkpoint_module"]
