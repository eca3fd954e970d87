"""The error for names of PyTorch's modules that a facade does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__all__ = ["without_counterpart"]


def without_counterpart(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module's facade.

    Args:
        module: PyTorch's name of the module.
    """

    def refuse(name: str) -> NoReturn:
        raise AttributeError(f"farcall.compat has no counterpart of {module}.{name}")

    return refuse
