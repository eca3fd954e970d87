"""Activations that are computed again in backward, for modules that are to be wrapped."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GATHERED", "checkpoint_module"]

M = TypeVar("M", bound=nn.Module)
_PLAIN: Final = "_forward_before_checkpointing"

GATHERED: Final = "_gathered_by_its_wrapper"
"""Attribute of a module that is wrapped: makes a context in which its parameters are whole."""


def checkpoint_module(module: M) -> M:
    """Have a module forget what its forward computes, and compute it again in backward; changed in place.

    Call it before the module is wrapped: ``FSDPv2(checkpoint_module(layer), mesh=mesh)``.

    Returns:
        ``module``.
    """
    if _PLAIN in vars(module):
        return module
    plain = vars(module).get("forward") or functools.partial(type(module).forward, module)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = vars(self)[_PLAIN]  # that of a copy computes with the copy's parameters
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        again = vars(self).get(GATHERED, contextlib.nullcontext)
        contexts = functools.partial(_contexts, again)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    vars(module)[_PLAIN] = plain
    module.forward = MethodType(forward, module)
    return module


def _contexts(again: Callable[[], Any]) -> tuple[Any, Any]:
    """Those of the first forward, and of the one in backward."""
    return contextlib.nullcontext(), again()
