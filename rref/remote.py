"""``remote``: call a function on a worker and leave its return value there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from rpc.agent.agent import UNSET_TIMEOUT
from rpc.api import keywords, not_callable, positional
from rpc.group.membership import WorkerReference
from rpc.runtime.interrupts import protected
from rref.names import check_object_name
from rref.reference import RRef, references

__all__ = ["remote"]

T = TypeVar("T")


@overload
def remote(
    to: WorkerReference,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    concurrency: int | None = None,
    name: str | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: WorkerReference,
    func: Callable[..., torch.futures.Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    concurrency: int | None = None,
    name: str | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: WorkerReference,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    concurrency: int | None = None,
    name: str | None = None,
) -> RRef[T]: ...
@protected  # references in the arguments are either sent or taken back
def remote(
    to: WorkerReference,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    concurrency: int | None = None,
    name: str | None = None,
) -> RRef[Any]:
    """Call ``func`` on another worker and return a reference to its value, which stays there.

    Returns immediately. Arguments are as for ``rpc_sync``; if ``func`` is a class, the reference is to a new
    instance of it. Calls of its methods run concurrently, each on its own thread, even those of one caller:
    the methods of an object that is not thread-safe must take a lock, or the object is created with
    ``concurrency=1``.

    Args:
        timeout: timeout in seconds for creating the object; if it takes longer, the reference cannot be used,
            ``to_here`` raises, and the owner frees the object when the reference is released. 0 for no limit.
            Default: the timeout of calls.
        concurrency: maximum number of the object's methods, called through references by any worker, that run
            at the same time, at least 1; default: no limit. With 1, each starts when the previous one has
            ended (for an ``async def``, returned) and its value is being sent, in the order of each caller's
            calls. But a call may overtake one with more than 64 KiB of arguments and, at the caller's own
            worker, one that carries references. A method that calls the object's methods through a reference,
            and waits, deadlocks. ``to_here`` and ``local_value`` do not count against the limit.
        name: name by which every worker, also one that joins later, finds the object: ``rpc.find(name)``. The
            name keeps the object until its owner leaves or is lost, or until ``rpc.remove_name(name)``. 1 to
            255 ASCII letters, digits and characters of ``_:./-``. If another object of ``to`` has it, the
            creation fails with ``NameTakenError``, and ``func`` does not run. Default: no name.

    Returns:
        An ``RRef`` whose owner is ``to``. If ``func`` raises, ``to_here`` raises the same error.

    Raises:
        UnknownWorkerError: there is no such worker.
        SerializationError: an argument cannot be serialized.
        NotInitializedError: ``rpc.init_rpc`` has not been called.
        ValueError: ``concurrency`` is not a positive integer.
        InvalidNameError: ``name`` cannot be the name of an object.

    Example::

        rref = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
        output = rref.rpc_sync().forward(torch.ones(1, 4))
    """
    shell = references()
    calls = shell.calls
    timeout = calls.rpc_timeout if timeout is UNSET_TIMEOUT else calls.effective_timeout(timeout)
    peer = shell.workers.find(to)
    if not callable(func):
        raise not_callable(func)
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise ValueError(
            f"concurrency is how many methods may run at a time, at least 1, not {concurrency!r:.60}"
        )
    object_header: dict[str, Any] = {} if concurrency is None else {"concurrency": concurrency}
    if name is not None:
        object_header["name"] = check_object_name(name)
    if type(args) is not tuple:
        args = positional(args)
    if type(kwargs) is not dict:
        kwargs = keywords(kwargs)
    payload = calls.dump_call(func, args, kwargs, peer)
    return shell.create(peer, object_header, payload, timeout, func, RRef._of)
