"""Sharded execution: collectives on farcall's agent, and what stands on them.

Importing it registers the backend ``farcall`` with PyTorch. What it offers is imported when it is used.

Example::

    import rpc, spmd

    rpc.init_rpc("worker0", rank=0, world_size=4)
    spmd.init_process_group()
    torch.distributed.all_reduce(tensor)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import farcall_guard

farcall_guard.check("rpc", "rref", "dist_autograd")

from spmd import backend

if TYPE_CHECKING:
    from spmd.collectives.start import init_process_group

__all__ = ["init_process_group"]

_PLACES: Final = {"init_process_group": "spmd.collectives.start"}

backend.register()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'spmd' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
