"""One program on many workers: tensor parallelism.

Example::

    from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(mlp, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
"""

from __future__ import annotations

from typing import Any

import farcall_guard

farcall_guard.check("rpc")

__all__ = ["explain"]


def __getattr__(name: str) -> Any:
    if name == "explain":  # looked up late: it brings PyTorch's DTensor along
        from spmd.tensor_parallel import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
