"""XLA's names, for tests of what PyTorch/XLA's own tests of SPMD mode hold it to.

``docs/xla_compatibility.md`` says which of their cases are held, where, and which cannot be.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from farcall import compat
from tests.group.spmd.driven import WORKERS

__all__ = ["IN_ORDER", "SimpleLinear", "mesh_of", "said", "theirs"]

IN_ORDER = ",".join(map(str, range(WORKERS)))


def theirs() -> Any:
    """XLA's modules by the names that programs give them, in the mode that the session has begun."""
    compat.install()
    modules = {
        "torch_xla": "torch_xla",
        "xm": "torch_xla.core.xla_model",
        "xr": "torch_xla.runtime",
        "xs": "torch_xla.distributed.spmd",
        "pl": "torch_xla.distributed.parallel_loader",
        "xu": "torch_xla.utils.utils",
    }
    found = SimpleNamespace(**{short: importlib.import_module(name) for short, name in modules.items()})
    found.xr.use_spmd()
    return found


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """All workers in order."""
    return theirs().xs.Mesh(list(range(WORKERS)), shape, names)


def said(t: Tensor) -> str:
    """How a tensor is cut, asked of XLA's binding."""
    spec: str = theirs().torch_xla._XLAC._get_xla_sharding_spec(t)
    return spec


class SimpleLinear(nn.Module):
    """Two layers, the second to one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result
