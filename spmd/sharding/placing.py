"""Modules on the logical device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmd.engine.api import is_logical
from spmd.engine.start import device

__all__ = ["place"]


def place(module: nn.Module) -> list[nn.Module]:
    """Move a module's parameters and buffers to the logical device, in place.

    What modules share stays shared, which ``module.to`` cannot do between different kinds of tensors.

    Returns:
        the modules inside that had something on the meta device: what they have now has no content.
    """
    moved: dict[Tensor, Any] = {}
    bare: list[nn.Module] = []
    for each in module.modules():
        for kept in (each._parameters, each._buffers):
            for name, t in list(kept.items()):
                if t is None or is_logical(t):
                    continue
                if t.is_meta and each not in bare:
                    bare.append(each)
                if t not in moved:
                    new = torch.empty_like(t, device=device()) if t.is_meta else t.detach().to(device())
                    moved[t] = nn.Parameter(new, t.requires_grad) if kept is each._parameters else new
                setattr(each, name, moved[t])  # recurrent layers keep a list of what was set
    return bare
