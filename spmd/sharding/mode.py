"""``use_spmd``, with what tensors can tell of their shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from spmd.engine import start
from spmd.engine.errors import SpmdError
from spmd.engine.logical_tensor import LogicalTensor
from spmd.sharding.sharded_tensor import install

__all__ = ["use_spmd"]


@functools.wraps(start.use_spmd)
def use_spmd(  # noqa: D103  it has that of the other one
    workers: int | Sequence[str] | None = None, *, auto: bool = False
) -> None:
    start.use_spmd(workers, auto=auto)
    install(LogicalTensor)
    try:
        torch.zeros((), device=start.device(), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # PyTorch's engine counts devices once
        start.shutdown()
        raise SpmdError(
            "this process has computed gradients before use_spmd(), and PyTorch takes no new device after "
            "that: call use_spmd() before the first backward"
        ) from error
