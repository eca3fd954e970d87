"""The engine behind the device ``spmd:0``: at most one for the whole process.

Backward runs on PyTorch's threads, so nothing here is thread-local.
"""

from __future__ import annotations

from typing import Final

import torch

from spmd.engine.driver.session import Session
from spmd.engine.errors import NotInSpmdModeError

__all__ = ["DEVICE", "NAME", "engine", "is_running", "set_engine"]

NAME: Final = "spmd"
DEVICE: Final = torch.device("privateuseone", 0)
"""The device; PyTorch calls it ``spmd:0`` once it is set up."""


_engine: Session | None = None


def set_engine(current: Session | None) -> None:
    """Set the engine of the device; None for no engine."""
    global _engine
    _engine = current


def is_running() -> bool:
    """Whether there is an engine."""
    return _engine is not None


def engine() -> Session:
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
