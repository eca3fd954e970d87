"""Changing a tensor's layout; its gradient is changed back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.engine import api as engine
from spmd.engine.program.program import Layout

__all__ = ["laid_out"]


def laid_out(t: Tensor, layout: Layout) -> Tensor:
    """Return a tensor with the same value and this layout; its gradient is returned in the layout
    of ``t``.
    """
    moved: Tensor = _LaidOut.apply(t, layout)  # type: ignore[no-untyped-call]
    return moved


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout) -> Tensor:
        ctx.before = engine.value_layout(t)
        return engine.redistributed(t, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return engine.redistributed(gradient, ctx.before), None
