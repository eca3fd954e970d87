"""Stands in for ``torch.distributed.rpc.rref_proxy``: proxies, and what calls methods for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rpc
from farcall.compat.torch_rpc import functions
from farcall.compat.torch_rpc.constants import UNSET_RPC_TIMEOUT
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc import rpc_async
from rref.proxy import RRefProxy

__all__ = ["RRefProxy"]


def _local_invoke(rref: rpc.RRef[Any], func_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of an object that is here."""
    return getattr(rref.local_value(), func_name)(*args, **kwargs)


_local_invoke_async_execution = rpc.functions.async_execution(_local_invoke)


def _invoke_rpc(
    rref: rpc.RRef[Any],
    rpc_api: Callable[..., Any],
    func_name: str,
    timeout: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of an object by ``rpc_sync``, ``rpc_async`` or ``remote``."""
    proxy = getattr(rref, rpc_api.__name__)(timeout)
    return getattr(proxy, func_name)(*args, **kwargs)


_LENT = (UNSET_RPC_TIMEOUT, functions, rpc_async)

__getattr__ = without_counterpart("torch.distributed.rpc.rref_proxy")
