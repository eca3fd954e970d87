"""Calls to all owners at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dist_autograd.api import autograd
from dist_autograd.root import Steps
from rpc.agent.futures import Future
from rpc.agent.waiting import wait_futures
from rpc.errors import WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.interrupts import is_interruption
from rref import RRef
from rref.proxy import RRefProxy

__all__ = ["add_steps", "on_all", "on_all_objects"]

T = TypeVar("T")


def on_all(parts: Mapping[str, T], doing: str, call: Callable[[T], Future[Any]]) -> list[Any]:
    """Make one call for each worker, and wait for all.

    Args:
        parts: the argument of each worker's call, by the worker's name.
        doing: description of the operation, for errors.
        call: makes the call.

    Returns:
        The values, in the order of ``parts``.

    Raises:
        AutogradError: this thread holds locks of parameters.
        WorkerLostError: a worker is gone. Then the others are not waited for.
        Exception: the error raised on a worker; all calls have ended by then.

        The notes of the exception name all workers on which it failed, and the outcome on the others.
    """
    autograd().models.locks.check_none_held(doing)
    calls = {worker: call(part) for worker, part in parts.items()}
    try:
        return wait_futures(list(calls.values()))
    except WorkerLostError as error:
        _add_notes(error, doing, calls)
        raise
    except Exception as error:
        if is_interruption(error):
            raise
        for future in calls.values():
            _error_of(future)
        _add_notes(error, doing, calls)
        raise


def on_all_objects(
    objects: Mapping[str, RRef[Any]], doing: str, call: Callable[[RRefProxy], Any]
) -> list[Any]:
    """Like ``on_all``, for a method of one object on each worker.

    Args:
        objects: references to the objects, by the worker's name.
        doing: as for ``on_all``.
        call: calls the method of the proxy that it is given.
    """
    if len(objects) > 1:
        return on_all(objects, doing, lambda each: call(each.rpc_async()))
    autograd().models.locks.check_none_held(doing)
    ((worker, only),) = objects.items()
    try:
        return [call(only.rpc_sync())]
    except Exception as error:
        if is_interruption(error):
            raise
        _add_failure(error, doing, worker, error)
        raise


def _add_notes(error: Exception, doing: str, calls: Mapping[str, Future[Any]]) -> None:
    done: list[str] = []
    under_way: list[str] = []
    for worker, future in calls.items():
        if not future.done():
            under_way.append(f"'{worker}'")
        elif (failure := _error_of(future)) is not None:
            _add_failure(error, doing, worker, failure)
        else:
            done.append(f"'{worker}'")
    _add_outcomes(error, doing, done, under_way)


def add_steps(error: Exception, steps: Steps) -> None:
    """Add notes about the steps that were to be performed by a backward pass which has failed."""
    done, begun = steps.done.copy(), steps.begun.copy()  # parts that go on may still change them
    _add_outcomes(error, "step", _names(done), _names(begun - done))


def _names(peers: set[Peer]) -> list[str]:
    return sorted(f"'{peer.name}'" for peer in peers)


def _add_outcomes(error: Exception, doing: str, done: list[str], under_way: list[str]) -> None:
    if done:
        error.add_note(f"{doing} was done on {', '.join(done)}")
    if under_way:
        error.add_note(f"{doing} is under way on {', '.join(under_way)}")


def _add_failure(error: Exception, doing: str, worker: str, failure: Exception) -> None:
    error.add_note(f"{doing} failed on worker '{worker}': {type(failure).__name__}: {failure}")


def _error_of(future: Future[Any]) -> Exception | None:
    """Wait for a call and return its error, if any."""
    try:
        future.wait()
    except Exception as error:
        if is_interruption(error):
            raise
        return error
    return None
