"""Stands in for ``torch.distributed.rpc.internal``: the pickler, and what names a call in a profile."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.runtime.current import current_agent
from rpc.serialization.portable import PortablePickler

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(Enum):
    """How a call was made."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RemoteException(NamedTuple):
    """The text and the class of an exception."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler(PortablePickler):
    """Turns an object into bytes and a list of tensors, and back.

    Programs derive from it, register reducers for classes of their own, and put theirs into effect with
    ``_use_rpc_pickler``.
    """

    def __init__(self) -> None:
        self.reducers = self._class_reducer_dict = dict[type, Callable[[Any], Any]]()

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Reduce objects of exactly this class by ``reducer``; only the first registration counts."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        """The reverse of ``serialize``, with PyTorch's names of the arguments."""
        return super().deserialize(binary_data, tensor_table)


_internal_rpc_pickler = _InternalRPCPickler()


def _get_current_rpc_agent() -> Any:
    """The agent of this process."""
    return current_agent()


def serialize(obj: Any) -> tuple[bytes, list[Tensor]]:
    """An object as bytes and the tensors in it."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Tensor]) -> Any:
    """The reverse of ``serialize``."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _run_function(python_udf: PythonUDF | AttributeError) -> Any:
    """Call what a ``PythonUDF`` holds, as a callee does.

    Returns:
        Its value. If it raises an exception, or is an ``AttributeError`` itself, a ``RemoteException``, whose
        text is printed.
    """
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:
        text = f"On {_get_current_rpc_agent().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise the exception that a ``RemoteException`` describes; nothing happens for any other value.

    Raises:
        RuntimeError: an exception of that class cannot be made of a text.
    """
    if not isinstance(result, RemoteException):
        return
    try:
        error = result.exception_type(result.msg)
    except BaseException as failure:
        raise RuntimeError(
            f"the callee raised {result.exception_type.__name__}, which cannot be made of its text here "
            f"({failure}): {result.msg}"
        ) from failure
    raise error


__getattr__ = without_counterpart("torch.distributed.rpc.internal")
