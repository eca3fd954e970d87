"""``torch_xla.utils.checkpoint``: PyTorch's own serves here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

__all__ = ["checkpoint"]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute activations again in backward."""
    kwargs.setdefault("use_reentrant", True)
    return _checkpoint(function, *args, **kwargs)
