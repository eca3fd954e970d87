"""The outcome of a worker's main function, as its process reports it to its parent."""

from __future__ import annotations

from typing import Any

import cloudpickle

from rpc.errors import RpcError
from rpc.runtime.tracebacks import folded
from rpc.serialization.failures import text_of

__all__ = ["Outcome", "failed", "failure", "pack", "returned"]

Outcome = tuple[Any, ...]
"""The returned value, alone; or an exception and its traceback as text."""


def returned(value: Any) -> Outcome:
    """Make the outcome of a function that has returned."""
    return (value,)


def failed(error: BaseException) -> Outcome:
    """Make the outcome of a function that has raised."""
    return error, folded(error)


def pack(outcome: Outcome) -> bytes:
    """Serialize an outcome. A value or an exception that cannot be pickled becomes an error that says so."""
    try:
        packed = cloudpickle.dumps(outcome)
        if isinstance(outcome[0], BaseException):
            cloudpickle.loads(packed)  # an exception's class may not take the arguments that it keeps
    except Exception as error:
        trace = outcome[1] if len(outcome) > 1 else ""
        why = RpcError(f"{outcome[0]!r} cannot be sent to the parent: {text_of(error)}")
        packed = cloudpickle.dumps((why, trace))
    return bytes(packed)


def failure(worker: str, outcome: Outcome) -> BaseException:
    """Return the exception to raise in the parent.

    Args:
        worker: name of the worker and its process, for the message.
        outcome: an exception and its traceback.
    """
    error, trace = outcome
    if isinstance(error, SystemExit):
        return error
    failure = RpcError(f"{worker} raised {type(error).__name__}: {text_of(error)}\n\n{trace}")
    failure.__cause__ = error
    return failure
