"""Sharded execution: collectives on farcall's agent, and tensor parallelism.

Importing it registers the backend ``farcall`` with PyTorch. What it offers is imported when it is used.

Example::

    import rpc, spmd
    from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rpc.init_rpc("worker0", rank=0, world_size=4)
    spmd.init_process_group()
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(mlp, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import farcall_guard

farcall_guard.check("rpc", "rref", "dist_autograd")

from spmd import backend

if TYPE_CHECKING:
    from spmd.collectives.start import init_process_group
    from spmd.engine.start import (
        device,
        global_device_count,
        is_spmd,
        report,
        shutdown,
        strict,
        sync,
        use_spmd,
    )
    from spmd.tensor_parallel import explain

__all__ = [
    "device",
    "explain",
    "global_device_count",
    "init_process_group",
    "is_spmd",
    "report",
    "shutdown",
    "strict",
    "sync",
    "use_spmd",
]

_PLACES: Final = {
    "explain": "spmd.tensor_parallel",
    "init_process_group": "spmd.collectives.start",
    **dict.fromkeys(
        ("device", "global_device_count", "is_spmd", "report", "shutdown", "strict", "sync", "use_spmd"),
        "spmd.engine.start",
    ),
}

backend.register()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'spmd' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
