"""``use_spmd``, with what tensors can tell of their shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from spmd.engine import start
from spmd.engine.device import LogicalTensor
from spmd.sharding.sharded_tensor import install

__all__ = ["use_spmd"]


@functools.wraps(start.use_spmd)
def use_spmd(  # noqa: D103  it has that of the other one
    workers: int | Sequence[str] | None = None, *, auto: bool = False
) -> None:
    start.use_spmd(workers, auto=auto)
    install(LogicalTensor)
