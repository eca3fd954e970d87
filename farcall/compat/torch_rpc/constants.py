"""Stands in for ``torch.distributed.rpc.constants``."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.options import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]

DEFAULT_RPC_TIMEOUT_SEC: Final = DEFAULT_RPC_TIMEOUT
DEFAULT_SHUTDOWN_TIMEOUT: Final = 0.0
"""No limit."""
DEFAULT_PROCESS_GROUP_TIMEOUT: Final = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: Final = -1.0
"""As a timeout: the default one."""

_DEFAULT_INIT_METHOD = DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT

__getattr__ = without_counterpart("torch.distributed.rpc.constants")
