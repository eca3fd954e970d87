"""Makes PyTorch know the backend ``farcall``. Imports nothing of ours until a group is made."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse", "register"]

_refusal: str | None = None


def refuse(reason: str | None) -> None:
    """Make no process groups in this process from now on, for this reason; None: make them again."""
    global _refusal
    _refusal = reason


def register() -> None:
    """Register the backend, unless it is registered. An entry point of PyTorch's."""
    from torch.distributed import Backend, is_available

    if is_available() and "farcall" not in Backend.backend_list:
        Backend.register_backend("farcall", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, pg_options: Any) -> Any:
    """What c10d calls for each rank of a new group."""
    from spmd.collectives.creation import create
    from spmd.engine.errors import SpmdError

    if _refusal is not None:
        raise SpmdError(_refusal)

    return create(options, pg_options)
