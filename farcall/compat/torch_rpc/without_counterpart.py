"""What a module that stands in for one of PyTorch's says of names that it does not lend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__all__ = ["without_counterpart"]


def without_counterpart(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of what stands in for a module.

    Args:
        module: PyTorch's name of it.
    """

    def refuse(name: str) -> NoReturn:
        raise AttributeError(f"farcall.compat has no counterpart of {module}.{name}")

    return refuse
