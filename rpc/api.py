"""The user's functions on a running agent. ``init_rpc`` is in ``rpc/lifecycle/``, ``remote`` in ``rref``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from rpc import retrying
from rpc.agent.futures import Future
from rpc.agent.interface import AgentInterface
from rpc.agent.waiting import collected_futures
from rpc.errors import NotInitializedError, with_article
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from rpc.options import UNSET_TIMEOUT, RpcBackendOptions
from rpc.runtime import current, interrupts
from rpc.runtime.current import check_not_forked, current_agent, is_initialized

T = TypeVar("T")

_agent: Final[Callable[[], AgentInterface]] = current_agent

UNSET_RPC_TIMEOUT: Final = UNSET_TIMEOUT
"""Value of a ``timeout`` that means the default set by ``init_rpc`` or ``set_rpc_timeout``."""

_SINGLE: Final = (str, bytes, bytearray, Mapping, set, frozenset, np.ndarray, Tensor, torch.nn.Module)
"""Types of iterables that are one argument, whose comma is missing: ``args=(x)``."""


# The result of an ``async def`` function, or one with ``async_execution``, is awaited at the callee.
@overload
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., torch.futures.Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Any:
    """Call ``func`` on another worker and wait for its value.

    Args:
        to: name, id (rank) or ``WorkerInfo`` of the callee, which may be the caller itself.
        func: a Python function, class, bound, static or class method, ``async def`` function, builtin or
            torch operator, or TorchScript function. The callee uses its own function of that module and name,
            also in its script; functions that the callee does not have (lambdas, local functions, those of a
            notebook) are sent by value, with copies of the globals that they use. It runs with PyTorch's
            default modes (gradients enabled, no autocast) in a context of its own; changes of modes and
            context variables that it leaves do not affect later calls.
        args: positional arguments. Those of up to 1 MiB, and on one host all on the CPU, are copied when the
            call is made: later changes do not reach the callee. Larger tensors for another host or on a
            device are sent from where they are, and must not be changed until the call is over.
        kwargs: keyword arguments.
        timeout: timeout in seconds; 0 for no limit. The callee is not interrupted. Default: 60, or the value
            of ``set_rpc_timeout``.
        retries: number of times that the call may be made again if the callee or a message is lost
            (``WorkerLostError`` of the callee, ``MessageLostError``). The function must be one that may run
            several times, since a lost callee may have run it. In a dynamic group, the call waits until a
            worker has joined under the callee's name; in a static one, a worker does not come back, and only
            lost messages are sent again. ``timeout`` is for all attempts together. Default: the call is made
            once.

    Returns:
        The return value of ``func``; tensors in it belong to the caller.

    Raises:
        RpcTimeoutError: there was no answer in time.
        WorkerLostError: the callee is gone; with ``retries``, it has not come back, or was lost each time.
        UnknownWorkerError: there is no such worker.
        ValueError: ``retries`` is no number of retries.
        SerializationError: an argument or the value cannot be serialized.
        BlockingCallError: called inside an ``async def`` callee; use ``await rpc_async(...)`` there.
        Exception: the error that ``func`` raised, of the same type, with the callee's traceback as a note.

    Example::

        total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    """
    if not callable(func):
        raise not_callable(func)
    if type(args) is not tuple:
        args = positional(args)
    if type(kwargs) is not dict:
        kwargs = keywords(kwargs)
    if retries:
        return retrying.call(_agent(), to, func, args, keywords(kwargs), timeout, retries)
    agent: AgentInterface | None = current.agent
    if agent is None or not interrupts.are_wrapped:
        agent = _agent()
    return agent.call(to, func, args, kwargs, timeout)


@overload
def rpc_async(
    to: WorkerReference,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Future[T]: ...
@overload
def rpc_async(
    to: WorkerReference,
    func: Callable[..., torch.futures.Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Future[T]: ...
@overload
def rpc_async(
    to: WorkerReference,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Future[T]: ...
def rpc_async(
    to: WorkerReference,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Future[Any]:
    """Call ``func`` on another worker and return a future immediately.

    Arguments are as for ``rpc_sync``: tensors of more than 1 MiB for another host or on a device must not be
    changed until the future is completed, and neither must those that a callee returns until its caller has
    them. The rest of a transfer whose call has timed out may still be read from them. With ``retries``, no
    argument may be changed until the future is completed, as each attempt serializes them anew. Errors in
    making the call (an unknown worker, an argument that cannot be serialized) are raised here; all others are
    set on the future.

    Returns:
        A ``torch.futures.Future`` of the value; ``wait()`` for it, chain with ``then``, or ``await`` it in a
        coroutine on any asyncio loop.

    Example::

        futures = [rpc.rpc_async(worker, evaluate, args=(batch,)) for worker in workers]
        scores = [future.wait() for future in futures]
    """
    if not callable(func):
        raise not_callable(func)
    if type(args) is not tuple:
        args = positional(args)
    if type(kwargs) is not dict:
        kwargs = keywords(kwargs)
    if retries:
        future = retrying.call_async(_agent(), to, func, args, keywords(kwargs), timeout, retries)
    else:
        future = _agent().call_async(to, func, args, kwargs, timeout)
    collect(future)
    return future


def collect(future: Future[Any]) -> None:
    """Add a future to those that ``wait_all`` waits for, inside its block."""
    collected = getattr(collected_futures, "future_list", None)
    if collected is not None:
        collected.append(future)


def not_callable(func: object) -> TypeError:
    """Return the error for a ``func`` that cannot be called."""
    return TypeError(f"function should be callable, not {type(func).__name__} {func!r:.100}")


def positional(args: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return the user's positional arguments of a call as a tuple."""
    if type(args) is tuple:
        return args
    if args is None or (isinstance(args, Mapping) and not args):
        return ()
    if isinstance(args, _SINGLE) or not isinstance(args, Iterable):
        raise TypeError(
            f"args must be a tuple or list of positional arguments, not {with_article(type(args))}: "
            "for a single argument write args=(x,)"
        )
    return tuple(args)


def keywords(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's keyword arguments of a call as a new dict."""
    if not kwargs:
        return {}
    try:
        return dict(kwargs)
    except (TypeError, ValueError):
        given = type(kwargs).__name__
        raise TypeError(f"kwargs must be a dict of keyword arguments, not a {given}") from None


def get_worker_info(worker_name: WorkerReference | None = None) -> WorkerInfo:
    """Return name and id of a worker, by default of this one.

    Raises:
        UnknownWorkerError: there is no worker with that name.
    """
    return _agent().get_worker_info(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Return names and ids of all workers in the group, by id."""
    return list(_agent().get_worker_infos())


def get_rpc_timeout() -> float:
    """Return the default timeout of calls, in seconds; 0 for no limit."""
    return float(_agent().rpc_timeout)


def set_rpc_timeout(seconds: float) -> None:
    """Set the default timeout of calls made from now on, in seconds; 0 for no limit.

    Raises:
        TypeError, ValueError: it is not a number of seconds.
    """
    _agent().rpc_timeout = RpcBackendOptions(rpc_timeout=seconds).rpc_timeout


def all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange objects: each worker gives one, each gets all.

    Args:
        obj: this worker's object, which must be serializable.
        worker_names: names of the workers that take part, including this one; default: all workers in the
            group. All must give the same names. Several threads may take part in different rounds at once;
            rounds among the same workers are matched in the order in which each worker begins them.
        timeout: timeout in seconds for each message and for the others to arrive; 0 for no limit. By default,
            the default timeout applies to messages, and the others may take any time to arrive.

    Returns:
        Each worker's object, by the worker's name.

    Raises:
        RpcTimeoutError: a message or another worker took too long.
        WorkerLostError: a worker that takes part is gone.

    Example::

        losses = rpc.all_gather(loss.item())      # {"trainer0": 0.31, "trainer1": 0.29}
    """
    return _agent().all_gather(obj, worker_names, timeout)


def barrier(worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all workers, or those named, have called this. Arguments as for ``all_gather``."""
    all_gather(None, worker_names, timeout)


def get_debug_info() -> dict[str, int]:
    """Return current counts, by name.

    Keys that begin with ``agent.`` count threads, tasks, calls and messages; those from ``rref`` references:
    ``num_owner_rrefs`` (objects of this worker that others refer to), ``num_forks`` (their references to
    them), ``num_pending_users`` (references on their way), ``num_pending_futures`` (objects still being
    created elsewhere); and those from ``dist_autograd`` contexts: ``num_autograd_contexts`` (contexts that
    this worker knows) and ``num_current_backward_passes`` (backward passes in which it takes part).

    Example::

        rpc.get_debug_info()["agent.pending_calls"]
    """
    return _agent().get_debug_info()


def shutdown(
    graceful: bool = True,
    timeout: float = 0.0,
    *,
    release_references: bool = True,
    raise_on_leaks: bool = False,
) -> None:
    """Leave the group and end this process's agent.

    Args:
        graceful: whether to wait first: in a static group until all workers have called ``shutdown`` and no
            call is under way anywhere, including calls made by calls; in a dynamic one until this worker's
            own work is done. Otherwise it leaves at once; calls under way fail, here and at the other
            workers. A call that has timed out, or was cancelled, counts as under way until its callee has
            ended. A worker that has died, or whose program has ended, is not waited for, and causes no error
            here; if it died or crashed, the log has a warning that names it.
        timeout: timeout in seconds for that wait; 0 for no limit, since a worker that serves others waits
            here as long as they work: then a callee that never ends blocks all workers here. The log names
            the workers that are waited for; a worker that is silent is lost after ``lost_after`` seconds.
        release_references: whether to release all references to objects of other workers before leaving, so
            that their owners free them.
        raise_on_leaks: whether to raise if others still hold references to objects of this worker at the end.

    Raises:
        NotInitializedError: there is no agent.
        RpcError: another thread is waiting in ``shutdown`` already, or a callee called it gracefully.
        RpcTimeoutError: not all work ended in time; the text names the workers that are not in shutdown or
            still busy. This worker has left all the same.
        RRefError: others hold references, with ``raise_on_leaks``. This worker has left all the same.
    """
    if not is_initialized():
        check_not_forked()
        raise NotInitializedError(
            "shutdown: RPC has not been initialized, or is shut down already. Call init_rpc first, and "
            "shutdown only once, at the end. "
            "(Current RPC agent is not set! Did you initialize the RPC framework?)"
        )
    _agent().shutdown(graceful, timeout, release_references=release_references, raise_on_leaks=raise_on_leaks)
