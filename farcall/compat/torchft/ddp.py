"""``torchft.ddp``: gradients are averaged over the participants of a ``Manager``."""

from __future__ import annotations

import inspect
from typing import Any, Final

from torch import nn

from farcall.compat.torchft.manager import Manager
from spmd.elastic import reducer

__all__ = ["DistributedDataParallel", "PureDistributedDataParallel"]

_OPTIONS: Final = frozenset(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters)


class DistributedDataParallel(reducer.DistributedDataParallel):
    """Averages gradients during the backward pass.

    Args:
        manager: the manager.
        module: the module.
        kwargs: options of PyTorch's ``DistributedDataParallel``, which have no effect.

    Raises:
        TypeError: an option is unknown.
    """

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        if unknown := sorted(set(kwargs) - _OPTIONS):
            raise TypeError(f"DistributedDataParallel has no option {', '.join(unknown)}")
        super().__init__(module)
        manager.average_gradients_of(self)


PureDistributedDataParallel = DistributedDataParallel
