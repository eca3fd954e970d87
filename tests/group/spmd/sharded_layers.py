"""Layers, a mesh, and a comparison of training with that in one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spmd
from spmd.fsdp.wrap import transformer_auto_wrap_policy
from tests.group.spmd.driven import WORKERS


def on_device(t: Tensor) -> Tensor:
    return t.to(spmd.device())


def fsdp_mesh() -> spmd.Mesh:
    return spmd.Mesh(range(WORKERS), (WORKERS, 1), ("fsdp", "model"))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def layers(width: int = 8) -> nn.Sequential:
    return nn.Sequential(Layer(width), Layer(width), nn.Linear(width, 3))


BY_LAYER = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})


def assert_trains_alike(model: nn.Module, alone: nn.Module, mesh: spmd.Mesh, axes: Any = "fsdp") -> None:
    """Three steps of both, on the same batches."""
    mine, its = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(alone.parameters())
    for _ in range(3):
        x, y = torch.randn(8, 8), torch.randint(3, (8,))
        cut = spmd.mark_sharding(on_device(x), mesh, (axes, None))
        mine.zero_grad()
        its.zero_grad()
        loss, expected = cross_entropy(model(cut), on_device(y)), cross_entropy(alone(x), y)
        torch.autograd.backward([loss, expected])
        mine.step()
        its.step()
        torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)
