"""Makes PyTorch know the backend ``farcall``. Imports nothing of ours until a group is made."""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Register the backend, unless it is registered. An entry point of PyTorch's."""
    from torch.distributed import Backend, is_available

    if is_available() and "farcall" not in Backend.backend_list:
        Backend.register_backend("farcall", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, pg_options: Any) -> Any:
    """What c10d calls for each rank of a new group."""
    from spmd.collectives.creation import create

    return create(options, pg_options)
