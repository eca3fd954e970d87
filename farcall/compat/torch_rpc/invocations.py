"""PyTorch's own doors to a call, below ``rpc_sync``: ``_invoke_rpc`` and its kin of ``torch._C``.

All lead to ``rpc_async`` and ``remote``. Whether a function answers later is known by the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import rpc
from farcall.compat.torch_rpc.internal import _internal_rpc_pickler
from rpc.group.membership import WorkerReference
from rref.torch_internals import script_functions

__all__ = [
    "invoke_remote_builtin",
    "invoke_remote_python_udf",
    "invoke_remote_torchscript",
    "invoke_rpc",
    "invoke_rpc_builtin",
    "invoke_rpc_python_udf",
    "invoke_rpc_torchscript",
]

Future = torch.futures.Future[Any]
To = WorkerReference


def invoke_rpc(
    to: To,
    func: Callable[..., Any],
    rpc_type: object,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rpc_timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> Future:
    """Call a function. What PyTorch uses ``rpc_type`` for, the name in a profile, says ``async``."""
    del rpc_type
    return rpc.rpc_async(to, func, args, kwargs, rpc_timeout)


def invoke_rpc_builtin(to: To, operator: str, timeout: float, *args: Any, **kwargs: Any) -> Future:
    """Call an operator such as ``aten::add``."""
    return rpc.rpc_async(to, _operator(operator), args, kwargs, timeout)


def invoke_remote_builtin(to: To, operator: str, timeout: float, *args: Any, **kwargs: Any) -> rpc.RRef[Any]:
    """Like ``invoke_rpc_builtin``, with a reference to the value as the result."""
    return rpc.remote(to, _operator(operator), args, kwargs, timeout)


def invoke_rpc_python_udf(
    to: To, pickled: bytes, tensors: Sequence[Tensor], timeout: float, is_async_execution: bool
) -> Future:
    """Call what a ``PythonUDF`` holds that ``serialize`` has made bytes and tensors of."""
    del is_async_execution
    call = _internal_rpc_pickler.deserialize(pickled, tensors)
    return rpc.rpc_async(to, call.func, call.args, call.kwargs, timeout)


def invoke_remote_python_udf(
    to: To, pickled: bytes, tensors: Sequence[Tensor], timeout: float, is_async_execution: bool
) -> rpc.RRef[Any]:
    """Like ``invoke_rpc_python_udf``, with a reference to the value as the result."""
    del is_async_execution
    call = _internal_rpc_pickler.deserialize(pickled, tensors)
    return rpc.remote(to, call.func, call.args, call.kwargs, timeout)


def invoke_rpc_torchscript(
    to: str,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: float,
    is_async_execution: bool,
) -> Future:
    """Call a compiled function, by its qualified name."""
    del is_async_execution
    return rpc.rpc_async(to, _script(name), args, kwargs, timeout)


def invoke_remote_torchscript(
    to: str, name: str, timeout: float, is_async_execution: bool, *args: Any, **kwargs: Any
) -> rpc.RRef[Any]:
    """Like ``invoke_rpc_torchscript``, with a reference to the value as the result."""
    del is_async_execution
    return rpc.remote(to, _script(name), args, kwargs, timeout)


def _operator(name: str) -> Callable[..., Any]:
    namespace, separator, operator = name.partition("::")
    if not separator:
        raise ValueError(f"an operator's name is such as 'aten::add', not {name!r}")
    found: Callable[..., Any] = getattr(getattr(torch.ops, namespace), operator)
    return found


def _script(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = script_functions.find_function(name)
    if found is None:
        raise ValueError(f"no function of that name has been compiled here: {name}")
    return found
