"""Stands in for ``torch.distributed.rpc.server_process_global_profiler``."""

from __future__ import annotations

from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.profiling.server import ServerProfile

__all__ = ["_server_process_global_profile"]

_server_process_global_profile = ServerProfile

__getattr__ = without_counterpart("torch.distributed.rpc.server_process_global_profiler")
