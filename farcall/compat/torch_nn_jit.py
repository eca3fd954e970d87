"""Stands in for ``torch.distributed.nn.jit``, which writes the code of PyTorch's remote modules.

Ours need none, so nothing is here.
"""

from __future__ import annotations

from typing import Final

from farcall.compat.torch_rpc.without_counterpart import without_counterpart

__all__: list[str] = []

__path__: Final[list[str]] = []
"""Marks it as a package, like PyTorch's, so that importing a submodule fails with the usual error."""

__getattr__ = without_counterpart("torch.distributed.nn.jit")
