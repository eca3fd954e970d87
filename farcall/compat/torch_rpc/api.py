"""Stands in for ``torch.distributed.rpc.api``.

Programs and tests replace private names of this module (``_wait_all_workers``, ``_ignore_rref_leak``) and
expect it to use what they put there; so ``shutdown`` looks them up when it is called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

import torch.futures

import rpc
import rref
from farcall.compat.torch_rpc import internal, invocations
from farcall.compat.torch_rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from farcall.compat.torch_rpc.internal import _internal_rpc_pickler
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc import RRef, WorkerInfo, get_worker_info, remote, rpc_async, rpc_sync
from rpc.agent.waiting import collected_futures
from rpc.errors import NotInitializedError
from rpc.runtime.current import current_agent
from rpc.runtime.torch_internals import is_profiler_enabled

__all__ = ["RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

Future = torch.futures.Future
PyRRef = RRef
PythonUDF = internal.PythonUDF
RPCExecMode = internal.RPCExecMode
_build_rpc_profiling_key = internal._build_rpc_profiling_key

_ignore_rref_leak = True
"""Whether ``shutdown`` keeps silent about objects that others still hold references to."""

_default_pickler: Any = _internal_rpc_pickler


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Inside the block, calls are serialized by ``rpc_pickler``, a ``_InternalRPCPickler``."""
    global _default_pickler
    with rpc.use_pickler(rpc_pickler):
        _default_pickler = rpc_pickler
        try:
            yield
        finally:
            _default_pickler = _internal_rpc_pickler


_thread_local_var = collected_futures
_wait_all = rpc.wait_all
get_rpc_timeout = rpc.get_rpc_timeout
_set_rpc_timeout = rpc.set_rpc_timeout
_is_current_rpc_agent_set = rpc.is_initialized
_get_should_profile = is_profiler_enabled
_invoke_rpc = invocations.invoke_rpc
_invoke_rpc_builtin = invocations.invoke_rpc_builtin
_invoke_rpc_python_udf = invocations.invoke_rpc_python_udf
_invoke_rpc_torchscript = invocations.invoke_rpc_torchscript
_invoke_remote_builtin = invocations.invoke_remote_builtin
_invoke_remote_python_udf = invocations.invoke_remote_python_udf
_invoke_remote_torchscript = invocations.invoke_remote_torchscript


def _get_current_rpc_agent() -> Any:
    """The agent of this process."""
    return current_agent()


def _require_initialized(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        _get_current_rpc_agent()
        return function(*args, **kwargs)

    return checked


def _to_worker_info(to: str | int | WorkerInfo) -> WorkerInfo:
    """Return the worker with a name, rank or ``WorkerInfo``."""
    return rpc.get_worker_info(to)


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    """The type of a reference's object, or a future of it."""
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """The type of a reference's object, or a future of it."""
    return rref._get_type(timeout, blocking)


def _all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the objects of all workers (or of those named), by name."""
    return rpc.all_gather(obj, worker_names, timeout=timeout)


class AllGatherStates:
    """The state of one gathering, for programs that gather objects by calls of their own.

    Attributes:
        gathered_objects: what has been gathered, by the worker's name.
        proceed_signal: an event to set when nothing is missing.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all workers that are named have called it. A failure is logged, not raised."""
    try:
        rpc.barrier(worker_names)
    except RuntimeError:
        logger.exception("Failed to complete barrier")


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called it."""
    _all_gather(None, timeout=timeout)


def method_factory(method_name: str, docstring: str | None) -> Callable[..., Any]:
    """Return a function that calls a method of ``RRef``, as a subclass may define it under another name."""
    name = method_name

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        found = _RREF_METHODS.get(name) or getattr(RRef, name)
        return found(self, *args, **kwargs)

    method.__doc__ = docstring
    return method


_RREF_METHODS: Final = dict(inspect.getmembers(RRef, inspect.isfunction))
"""The methods of ``RRef`` as they are defined: a program may replace them with functions that call them."""

method_name = "to_here"
docstring = RRef.to_here.__doc__
method = RRef.to_here
new_method = method_factory(method_name, docstring)


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Give back all references to objects of others that this process holds."""
    rref.release_all_users()


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group; see ``rpc.shutdown``.

    Args:
        graceful: wait for all work everywhere first.
        timeout: for how long, in seconds; 0 for ever.
    """
    _get_current_rpc_agent()
    if graceful and _wait_all_workers is not _wait_all_workers_of_ours:
        try:
            _wait_all_workers(timeout)  # the program has replaced it and expects it to be called
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
    rpc.shutdown(
        graceful=graceful,
        timeout=timeout,
        release_references=_delete_all_user_and_unforked_owner_rrefs is _delete_ours,
        raise_on_leaks=graceful and not _ignore_rref_leak,
    )


_wait_all_workers_of_ours = _wait_all_workers
_delete_ours = _delete_all_user_and_unforked_owner_rrefs


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return the numbers of references that this process owns and holds, and of those in transit."""
    return {key: str(value) for key, value in rref.debug_info().items()}


def _get_debug_info() -> dict[str, str]:
    """All of ``rpc.get_debug_info``."""
    return {key: str(value) for key, value in rpc.get_debug_info().items()}


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Make ``agent`` the one of this process; done by ``init_rpc``."""
    raise NotInitializedError("farcall starts its agent in init_rpc; it cannot be given one")


def _init_rpc_backend(
    backend: Any,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """``init_rpc`` with a store that is there already."""
    rpc.init_with_store(backend, store, name or "", rank, world_size, rpc_backend_options)


_refuse = without_counterpart("torch.distributed.rpc.api")


def __getattr__(name: str) -> Any:
    if name == "_ALL_WORKER_NAMES":
        return {info.name for info in rpc.get_worker_infos()} if rpc.is_initialized() else set()
    return _refuse(name)
