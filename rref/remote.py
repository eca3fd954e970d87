"""``remote``: call a function on a worker and leave what it returns there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from rpc.agent.agent import UNSET_TIMEOUT
from rpc.api import keywords, not_callable, positional
from rpc.group.membership import WorkerReference
from rpc.runtime.interrupts import protected
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
) -> RRef[T]: ...
@overload
def remote(
    to: WorkerReference,
    func: Callable[..., torch.futures.Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(
    to: WorkerReference,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[T]: ...
@protected  # what travels beside the payload is sent, or taken back
def remote(
    to: WorkerReference,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Call ``func`` on another worker and return a reference to its value, which stays there.

    Returns at once. Arguments are as for ``rpc_sync``; with a class as ``func``, the reference is to a new
    object of it. Calls of its methods run side by side, each on a thread of its own, also those of one
    caller: an object that cannot stand it takes a lock in its methods.

    Args:
        timeout: seconds that making the object may take; if it takes longer, the reference becomes of no
            use, and ``to_here`` says so. 0 for none. Default: that of calls.

    Returns:
        An ``RRef``, whose owner is ``to``. If ``func`` raises, ``to_here`` does.

    Raises:
        UnknownWorkerError: there is no such worker.
        SerializationError: an argument cannot be sent.
        NotInitializedError: there is no agent.

    Example::

        rref = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
        output = rref.rpc_sync().forward(torch.ones(1, 4))
    """
    shell = references()
    agent = shell.agent
    timeout = agent.caller.effective_timeout(timeout)
    peer = agent.peer(to)
    if not callable(func):
        raise not_callable(func)
    payload = agent.caller.dump_call(func, positional(args), keywords(kwargs), peer)
    return shell.create(peer, {}, payload, timeout, func, RRef._of)
