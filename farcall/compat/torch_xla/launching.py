"""``torch_xla.distributed.xla_multiprocessing``, where there is one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MpModelWrapper", "MpSerialExecutor", "spawn"]


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Call the function here, as process 0.

    Raises:
        ValueError: several processes are asked for, which SPMD mode does not have.
    """
    if nprocs not in (None, 1):
        raise ValueError(f"nprocs is {nprocs}: in SPMD mode one process drives all workers")
    return fn(0, *args)


class MpModelWrapper:
    """A model for all processes of a machine: here for the one.

    Args:
        model: on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def to(self, device: torch.device | str) -> nn.Module:
        """The model, on a device."""
        return self._model.to(device)


class MpSerialExecutor:
    """Functions that processes of a machine run one after another: here the one runs them."""

    def run(self, fn: Callable[[], Any]) -> Any:
        """Return the function's result."""
        return fn()
