"""Modules on the logical device."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from spmd.engine.api import is_logical
from spmd.engine.driver.current import engine
from spmd.engine.driver.start import device

__all__ = ["place"]


def place(module: nn.Module) -> list[nn.Module]:
    """Move a module's parameters and buffers to the logical device, in place.

    Tensors that modules share stay shared, which ``module.to`` cannot do between different kinds of tensors;
    this holds even if the modules are moved one after the other.

    Returns:
        The submodules that had tensors on the meta device: their new tensors are uninitialized.

    Raises:
        RuntimeError: another module shares a tensor with this one and was moved before, and the tensor has
            been changed since.
    """
    moved = _MOVED.setdefault(engine(), WeakTensorKeyDictionary())
    bare: list[nn.Module] = []
    for each in module.modules():
        for kept in (each._parameters, each._buffers):
            for name, t in list(kept.items()):
                if t is None or is_logical(t):
                    continue
                if t.is_meta and each not in bare:
                    bare.append(each)
                there, version = moved.get(t, (_nothing, t._version))
                if (new := there()) is None:
                    new = torch.empty_like(t, device=device()) if t.is_meta else t.detach().to(device())
                    if kept is each._parameters:
                        new = nn.Parameter(new, t.requires_grad)
                    moved[t] = weakref.ref(new), t._version
                elif version != t._version:
                    raise RuntimeError(
                        f"'{name}' of {type(each).__name__} is shared with a module that was moved to "
                        f"{device()} before, and has been changed since: move modules that share parameters "
                        "before you change these"
                    )
                setattr(each, name, new)  # recurrent layers keep a list of what was set
    return bare


_MOVED: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()
"""The new tensors of those that were moved, and their versions at that time, by engine; held weakly."""


def _nothing() -> None:
    return None
