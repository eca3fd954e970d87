"""Optimizers that have state before the first step."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

__all__ = ["prime_optimizer"]


def prime_optimizer(optimizer: Optimizer) -> Optimizer:
    """Have an optimizer make its state, so that a checkpoint can be loaded into it. Returns the optimizer.

    It takes a step with gradients of zero. Parameters may change, by weight decay for one: load them as well.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer
