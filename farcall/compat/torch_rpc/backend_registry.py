"""Stands in for ``torch.distributed.rpc.backend_registry``."""

from __future__ import annotations

from farcall.compat.torch_rpc import api
from farcall.compat.torch_rpc import constants as rpc_constants
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.lifecycle.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

_LENT = (api, rpc_constants)

__getattr__ = without_counterpart("torch.distributed.rpc.backend_registry")
