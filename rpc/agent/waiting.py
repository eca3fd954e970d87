"""Waiting for several futures of calls."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any, Final, TypeVar, cast

import torch

from rpc.agent.futures import Future
from rpc.errors import RpcTimeoutError
from rpc.runtime.blocking import INFINITE, Event, check_may_block, wait_for_event
from rpc.runtime.interrupts import protected
from rpc.runtime.torch_internals import BaseFuture

__all__ = ["as_completed", "collected_futures", "wait_all", "wait_any", "wait_futures"]

F = TypeVar("F", bound="torch.futures.Future[Any]")

_call_when_done = BaseFuture.add_done_callback

collected_futures: Final = threading.local()
"""Inside ``wait_all``, its attribute ``future_list`` has this thread's futures so far."""


@contextlib.contextmanager
def wait_all() -> Iterator[None]:
    """Wait, on leaving the block, for all futures that ``rpc_async`` returned on this thread inside it.

    Raises:
        Exception: the error of the first future found to have failed, without waiting for the others.

    Example::

        with rpc.wait_all():
            for worker in workers:
                rpc.rpc_async(worker, evaluate)
    """
    futures: list[Future[Any]] = []
    outer = getattr(collected_futures, "future_list", None)
    collected_futures.future_list = futures
    try:
        yield
        wait_futures(futures)
    finally:
        if outer is None:
            del collected_futures.future_list
        else:
            collected_futures.future_list = outer


def as_completed(futures: Iterable[F], timeout: float | None = None) -> Iterator[F]:
    """Yield the futures, each as soon as it is completed; signal handlers interrupt at once.

    Args:
        futures: futures from ``rpc_async`` or ``then``; each is yielded once.
        timeout: time in seconds from now after which ``RpcTimeoutError`` is raised; default: no limit.
    Example::

        for future in rpc.as_completed([rpc.rpc_async(worker, evaluate) for worker in workers]):
            print(future.result())
    """
    awaited = list({id(future): future for future in futures}.values())
    deadline = INFINITE if timeout is None else monotonic() + timeout
    changed = Event()
    done: list[F] = []
    if not all(future.done() for future in awaited):
        check_may_block()
    for future in awaited:
        _call_when_done(future, functools.partial(_note, future, done, changed))
    for index in range(len(awaited)):
        while len(done) <= index:
            changed.clear()
            if len(done) <= index and not wait_for_event(changed, deadline):
                late = f"{len(awaited) - index} of {len(awaited)} futures"
                raise RpcTimeoutError(f"{late} were not completed within {timeout:g} s; they go on")
        yield done[index]


def wait_any(futures: Iterable[F], timeout: float | None = None) -> F:
    """Wait until one of the futures is completed, and return that; arguments as for ``as_completed``.
    ``ValueError`` if there are none.
    """
    for future in as_completed(futures, timeout):
        return future
    raise ValueError("there are no futures to wait for")


def wait_futures(futures: list[Any]) -> list[Any]:
    """Wait for all futures, or until one fails; signal handlers interrupt at once.

    Returns:
        Their values, in order.

    Raises:
        The error of the first one that is found to have failed.
    """
    for future in as_completed(futures):
        future.value()
    return [cast("torch.futures.Future[Any]", future).value() for future in futures]


@protected
def _note(future: torch.futures.Future[Any], done: list[Any], changed: Event, _: object) -> None:
    done.append(future)
    changed.set()
