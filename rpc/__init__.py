"""Calls between workers and references to objects on them, under the names of ``torch.distributed.rpc``.

Example::

    from farcall import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

import farcall_guard

farcall_guard.check(*farcall_guard.installed("rref", "dist_autograd"))

from rpc import errors, functions
from rpc.agent.futures import Future
from rpc.agent.waiting import as_completed, wait_all, wait_any
from rpc.api import (
    UNSET_RPC_TIMEOUT,
    all_gather,
    barrier,
    get_debug_info,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    rpc_async,
    rpc_sync,
    set_rpc_timeout,
    shutdown,
)
from rpc.group.workers import WorkerInfo
from rpc.lifecycle.backend_registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    register_backend,
)
from rpc.lifecycle.local_processes import LocalGroup, local_group, spawn
from rpc.lifecycle.startup import init_rpc, init_with_store
from rpc.lifecycle.worker_watch import on_worker_joined, on_worker_lost
from rpc.mapping import MapResults
from rpc.mapping import map as map  # noqa: A004  # not in __all__: it would replace Python's own
from rpc.options import (
    AgentOptions,
    GrpcRpcBackendOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    TlsOptions,
)
from rpc.runtime import events
from rpc.runtime.current import is_initialized
from rpc.serialization.portable import PortablePickler
from rpc.serialization.settings import allow_class, allow_function, allow_methods, use_pickler
from rpc.streaming import Stream, stream

if TYPE_CHECKING:
    from farcall.observe.tracing import trace as trace
    from farcall.serving import serve as serve
    from rref.names import find as find
    from rref.names import remove_name as remove_name
    from rref.reference import RRef as RRef
    from rref.remote import remote as remote

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "AgentOptions",
    "BackendType",
    "Future",
    "GrpcRpcBackendOptions",
    "LocalGroup",
    "MapResults",
    "PortablePickler",
    "RRef",
    "RpcBackendOptions",
    "Stream",
    "TensorPipeRpcBackendOptions",
    "TlsOptions",
    "WorkerInfo",
    "all_gather",
    "allow_class",
    "allow_function",
    "allow_methods",
    "as_completed",
    "backend_registered",
    "barrier",
    "construct_rpc_backend_options",
    "errors",
    "events",
    "find",
    "functions",
    "get_debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "init_with_store",
    "is_initialized",
    "local_group",
    "on_worker_joined",
    "on_worker_lost",
    "register_backend",
    "remote",
    "remove_name",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "spawn",
    "stream",
    "trace",
    "use_pickler",
    "wait_all",
    "wait_any",
]

_HIGHER = {
    "RRef": "rref.reference",
    "find": "rref.names",
    "remote": "rref.remote",
    "remove_name": "rref.names",
    "serve": "farcall.serving",  # not in __all__: it needs gRPC
    "trace": "farcall.observe.tracing",
}
"""Names of this package, and the modules of higher packages that define them."""


def __getattr__(name: str) -> _Any:
    if name not in _HIGHER:
        raise AttributeError(f"module 'rpc' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(_HIGHER[name]), name)
    return value
