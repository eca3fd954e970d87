"""A backward that waits until a test opens its gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.serving import wait_at_gate


class Guarded(torch.autograd.Function):
    """Its backward waits at the gate of the worker that it runs on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        wait_at_gate("backward")
        return gradient


apply_guarded: Callable[[Tensor], Tensor] = Guarded.apply
