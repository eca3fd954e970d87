"""What users call on a running agent. ``init_rpc`` is in ``rpc/lifecycle/``, ``remote`` in ``rref``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import torch
from torch import Tensor

from rpc.agent.futures import Future, collected_futures
from rpc.agent.interface import AgentInterface
from rpc.errors import with_article
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from rpc.options import UNSET_TIMEOUT, RpcBackendOptions
from rpc.runtime.current import current_agent

T = TypeVar("T")

_agent: Final[Callable[[], AgentInterface]] = current_agent

UNSET_RPC_TIMEOUT: Final = UNSET_TIMEOUT
"""As a ``timeout``: the default that ``init_rpc`` or ``set_rpc_timeout`` set."""


# What an ``async def`` function or one with ``async_execution`` returns is awaited at the callee.
@overload
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T: ...
@overload
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., torch.futures.Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T: ...
@overload
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T: ...
def rpc_sync(
    to: WorkerReference,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call ``func`` on another worker and wait for its value.

    Args:
        to: the callee's name, id (rank) or ``WorkerInfo``; it may be the caller itself.
        func: a Python function, class, bound, static or class method, ``async def`` function, builtin or
            torch operator, or TorchScript function. It means the callee's own of that module and name, also
            of its script; what the callee does not have (lambdas, local functions, those of a notebook)
            travels by value, with copies of the globals that it uses. It runs with PyTorch's default modes
            (gradients on, no autocast) in a context of its own; modes and context variables that it leaves
            changed are not in force in later calls.
        args: positional arguments. Those of up to 1 MiB, and on one host all, are captured when the call is
            made: what is changed afterwards does not reach the callee. Larger tensors for another host are
            sent from where they are, and must stay as they are until the call is over.
        kwargs: keyword arguments.
        timeout: seconds after which ``RpcTimeoutError`` is raised; 0 for none. The callee is not
            interrupted. Default: 60, or what ``set_rpc_timeout`` set.

    Returns:
        What ``func`` returned; tensors in it are the caller's own.

    Raises:
        RpcTimeoutError: no answer in time.
        WorkerLostError: the callee is gone.
        UnknownWorkerError: there is no such worker.
        SerializationError: an argument or the value cannot be sent.
        BlockingCallError: called inside an ``async def`` callee; use ``await rpc_async(...)`` there.
        Exception: what ``func`` raised, of the same type, with the callee's traceback as a note.

    Example::

        total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    """
    if not callable(func):
        raise not_callable(func)
    if type(args) is not tuple:
        args = () if args is None else positional(args)
    return _agent().call(to, func, args, keywords(kwargs) if kwargs else {}, timeout)


@overload
def rpc_async(
    to: WorkerReference,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: WorkerReference,
    func: Callable[..., torch.futures.Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: WorkerReference,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
def rpc_async(
    to: WorkerReference,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Call ``func`` on another worker and return at once.

    Arguments are as for ``rpc_sync``: tensors of more than 1 MiB for another host must stay as they are until
    the future is completed, and so must those that a callee returns until its caller has them. The rest of a
    transfer whose call has timed out may still be read from them. Errors in making the call (an unknown
    worker, an argument that cannot be sent) are raised here; all others are the future's.

    Returns:
        A ``torch.futures.Future`` of the value; ``wait()`` on it, chain with ``then``, or ``await`` it in
        a coroutine on any asyncio loop.

    Example::

        futures = [rpc.rpc_async(worker, evaluate, args=(batch,)) for worker in workers]
        scores = [future.wait() for future in futures]
    """
    if not callable(func):
        raise not_callable(func)
    future = _agent().call_async(to, func, positional(args), keywords(kwargs), timeout)
    collect(future)
    return future


def collect(future: Future[Any]) -> None:
    """Inside ``wait_all``, note a future that it is to wait for."""
    collected = getattr(collected_futures, "future_list", None)
    if collected is not None:
        collected.append(future)


def not_callable(func: object) -> TypeError:
    """The error for a ``func`` that cannot be called."""
    return TypeError(f"function should be callable, not {type(func).__name__} {func!r:.100}")


def positional(args: Sequence[Any] | None) -> tuple[Any, ...]:
    """The positional arguments of a call as the user gave them, as a tuple."""
    if type(args) is tuple:
        return args
    if args is None:
        return ()
    if isinstance(args, (str, bytes, Tensor)) or not isinstance(args, Iterable):
        raise TypeError(
            f"args must be a tuple or list of positional arguments, not {with_article(type(args))}: "
            "for a single argument write args=(x,)"
        )
    return tuple(args)


def keywords(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments of a call as the user gave them, as a dict of its own."""
    if not kwargs:
        return {}
    try:
        return dict(kwargs)
    except (TypeError, ValueError):
        given = type(kwargs).__name__
        raise TypeError(f"kwargs must be a dict of keyword arguments, not a {given}") from None


def get_worker_info(worker_name: WorkerReference | None = None) -> WorkerInfo:
    """Name and id of a worker, by default of this one.

    Raises:
        UnknownWorkerError: there is no worker of that name.
    """
    return _agent().get_worker_info(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Names and ids of all workers in the group, by id."""
    return list(_agent().get_worker_infos())


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds; 0 for none."""
    return float(_agent().rpc_timeout)


def set_rpc_timeout(seconds: float) -> None:
    """Set the default timeout of calls made from now on, in seconds; 0 for none.

    Raises:
        TypeError, ValueError: it is no number of seconds.
    """
    _agent().rpc_timeout = RpcBackendOptions(rpc_timeout=seconds).rpc_timeout


def all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange objects: each worker gives one, each gets all.

    Args:
        obj: this worker's, anything that can be sent.
        worker_names: who takes part, this worker included; default: everybody in the group. All must
            give the same names. Several threads may take part in different rounds at once; rounds among
            the same workers are matched in the order in which each worker begins them.
        timeout: seconds that each message and the wait for the others may take; 0 for no limit. By
            default a message may take the default timeout, and the others any time to arrive.

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
    """Wait until all workers, or those named, have come to this point. Arguments as for ``all_gather``."""
    all_gather(None, worker_names, timeout)


def get_debug_info() -> dict[str, int]:
    """Counts of what there is right now, by name.

    Keys that begin with ``agent.`` tell of threads, tasks, calls and messages; the others, from ``rref``, of
    references: ``num_owner_rrefs`` (objects of this worker that others refer to), ``num_forks`` (their
    references to them), ``num_pending_users`` (references on their way), ``num_pending_futures`` (objects
    still being made elsewhere); and, from ``dist_autograd``, ``num_autograd_contexts`` (contexts that this
    worker knows) and ``num_current_backward_passes`` (backwards in which it takes part).

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
        graceful: wait first: in a static group until all workers have called ``shutdown`` and no call is
            under way anywhere, calls made by calls included; in a dynamic one until this worker's own work
            is done. Otherwise leave at once; calls under way fail, here and at the other workers. A call that
            has timed out, or that nobody waits for any more, counts as under way until its callee has ended.
            A worker that has died, or whose program has ended, is not waited for, and is no error here; if
            it died or crashed, the log has a warning that names it.
        timeout: seconds to wait for that; 0 for no limit, as a worker that serves others waits here for as
            long as these work: then a callee that never ends keeps all here. The log says for whom it waits,
            and nothing but work keeps it: who is silent is lost after ``lost_after`` seconds.
        release_references: give back all references to objects of others before leaving, so that their
            owners free them.
        raise_on_leaks: raise if others still hold references to objects of this worker at the end.

    Raises:
        NotInitializedError: there is no agent.
        RpcError: another thread is waiting in ``shutdown`` already, or a callee called it gracefully.
        RpcTimeoutError: not all work ended in time; names who is not in shutdown or still busy. This worker
            has left all the same.
        RRefError: others hold references, if asked to raise. This worker has left all the same.
    """
    _agent().shutdown(graceful, timeout, release_references=release_references, raise_on_leaks=raise_on_leaks)
