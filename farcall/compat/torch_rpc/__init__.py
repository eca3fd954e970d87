"""Stands in for ``torch.distributed.rpc``: PyTorch's names, public and private, for what farcall does.

Nothing is done here: see ``rpc`` and ``rref``. Names without a counterpart are absent, and an access to one
is an error that says so.
"""

from __future__ import annotations

import logging as _logging

import rpc as _rpc
from farcall.compat import torch_autograd as dist_autograd
from farcall.compat.torch_rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
    server_process_global_profiler,
    testing,
)
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.agent.agent import Agent
from rpc.profiling.server import ServerProfile

__all__ = [
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = _logging.getLogger("rpc")

RRef = PyRRef = _rpc.RRef
AllGatherStates = api.AllGatherStates
WorkerInfo = _rpc.WorkerInfo
RpcAgent = TensorPipeAgent = Agent
RpcBackendOptions = _rpc.RpcBackendOptions
TensorPipeRpcBackendOptions = options.TensorPipeRpcBackendOptions
BackendType = backend_registry.BackendType
BackendValue = backend_registry.BackendValue

init_rpc = _rpc.init_rpc
shutdown = api.shutdown
get_worker_info = _rpc.get_worker_info
get_rpc_timeout = _rpc.get_rpc_timeout
rpc_sync = _rpc.rpc_sync
rpc_async = _rpc.rpc_async
remote = _rpc.remote
backend_registered = backend_registry.backend_registered
construct_rpc_backend_options = backend_registry.construct_rpc_backend_options
init_backend = backend_registry.init_backend
register_backend = backend_registry.register_backend

method_factory = api.method_factory
new_method = api.new_method
_server_process_global_profile = ServerProfile
_invoke_remote_builtin = api._invoke_remote_builtin
_invoke_remote_python_udf = api._invoke_remote_python_udf
_invoke_remote_torchscript = api._invoke_remote_torchscript
_invoke_rpc_builtin = api._invoke_rpc_builtin
_invoke_rpc_python_udf = api._invoke_rpc_python_udf
_invoke_rpc_torchscript = api._invoke_rpc_torchscript
_delete_all_user_and_unforked_owner_rrefs = api._delete_all_user_and_unforked_owner_rrefs
_get_current_rpc_agent = api._get_current_rpc_agent
_get_debug_info = api._get_debug_info
_init_rpc_backend = api._init_rpc_backend
_is_current_rpc_agent_set = api._is_current_rpc_agent_set
_is_tensorpipe_available = True
_rref_context_get_debug_info = api._rref_context_get_debug_info
_set_and_start_rpc_agent = api._set_and_start_rpc_agent
_set_rpc_timeout = api._set_rpc_timeout
_TensorPipeRpcBackendOptionsBase = options._TensorPipeRpcBackendOptionsBase
_testing = testing
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT

_SUBMODULES = (
    *(api, backend_registry, constants, dist_autograd, functions, internal, options, rref_proxy),
    server_process_global_profiler,
)


def is_available() -> bool:
    """Whether RPC can be used: it can."""
    return True


__getattr__ = without_counterpart("torch.distributed.rpc")
