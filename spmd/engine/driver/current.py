"""The engine behind the device ``spmd:0``: at most one for the whole process.

Backward runs on PyTorch's threads, so nothing here is thread-local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from spmd.engine.driver.aliases import Value
from spmd.engine.driver.recorder import Recorder
from spmd.engine.errors import NotInSpmdModeError

__all__ = ["DEVICE", "NAME", "Engine", "engine", "is_running", "set_engine"]

NAME: Final = "spmd"
DEVICE: Final = torch.device("privateuseone", 0)
"""The device; PyTorch calls it ``spmd:0`` once it is set up."""


class Engine(Protocol):
    """The engine of the device's tensors: a recorder, and workers behind it.

    Attributes:
        on_accelerators: whether workers compute on accelerators.
    """

    recorder: Recorder
    on_accelerators: bool

    @property
    def workers(self) -> int:
        """Number of workers."""
        ...

    def fetch(self, value: Value) -> Tensor:
        """Return a value, as a whole, from the workers."""
        ...

    def fetch_parts(self, value: Value, workers: Sequence[int]) -> dict[int, Tensor]:
        """Return the shards of a value on these workers, by worker."""
        ...


_engine: Engine | None = None


def set_engine(current: Engine | None) -> None:
    """Set the engine of the device; None for no engine."""
    global _engine
    _engine = current


def is_running() -> bool:
    """Whether there is an engine."""
    return _engine is not None


def engine() -> Engine:
    """Return the engine of the device.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
    """
    if _engine is None:
        raise NotInSpmdModeError(
            "there are no workers behind the device 'spmd:0': call spmd.use_spmd() first. Tensors that were "
            "made before spmd.shutdown() are lost with the workers"
        )
    return _engine
