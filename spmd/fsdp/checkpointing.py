"""Activations that are computed again in backward, for modules that are to be wrapped."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_module"]

M = TypeVar("M", bound=nn.Module)


def checkpoint_module(module: M) -> M:
    """Have a module forget what its forward computes, and compute it again in backward; changed in place.

    Call it before the module is wrapped: ``FSDPv2(checkpoint_module(layer), mesh=mesh)``.

    Returns:
        ``module``.
    """
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    module.forward = forward
    return module
