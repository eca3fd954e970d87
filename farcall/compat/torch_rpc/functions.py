"""Stands in for ``torch.distributed.rpc.functions``."""

from __future__ import annotations

from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.functions import async_execution

__all__ = ["async_execution"]

__getattr__ = without_counterpart("torch.distributed.rpc.functions")
