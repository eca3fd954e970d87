"""Stands in for ``torch._C._distributed_rpc``, PyTorch's extension in C++, of which programs import names:
``PyRRef``, to tell references from other objects, before all.
"""

from __future__ import annotations

import rpc
from farcall.compat.torch_rpc import api, constants, options
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.agent.agent import Agent

__all__ = ["PyRRef", "RpcAgent", "RpcBackendOptions", "TensorPipeAgent", "WorkerInfo", "get_rpc_timeout"]

PyRRef = rpc.RRef
WorkerInfo = rpc.WorkerInfo
RpcAgent = TensorPipeAgent = Agent
RpcBackendOptions = rpc.RpcBackendOptions
_TensorPipeRpcBackendOptionsBase = options._TensorPipeRpcBackendOptionsBase
get_rpc_timeout = rpc.get_rpc_timeout
_set_rpc_timeout = rpc.set_rpc_timeout
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_delete_all_user_and_unforked_owner_rrefs = api._delete_all_user_and_unforked_owner_rrefs
_invoke_remote_builtin = api._invoke_remote_builtin
_invoke_remote_python_udf = api._invoke_remote_python_udf
_invoke_remote_torchscript = api._invoke_remote_torchscript
_invoke_rpc_builtin = api._invoke_rpc_builtin
_invoke_rpc_python_udf = api._invoke_rpc_python_udf
_invoke_rpc_torchscript = api._invoke_rpc_torchscript
_get_current_rpc_agent = api._get_current_rpc_agent
_is_current_rpc_agent_set = api._is_current_rpc_agent_set
_rref_context_get_debug_info = api._rref_context_get_debug_info
_set_and_start_rpc_agent = api._set_and_start_rpc_agent

__getattr__ = without_counterpart("torch._C._distributed_rpc")
