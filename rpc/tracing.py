"""``trace``: found by its entry point, since the implementation is in a package above this one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Final

from rpc.entry_points import entry_points

__all__ = ["trace"]

_GROUP: Final = "rpc.tracing"
_NAME: Final = "trace"


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Trace all workers of the group for the duration of a ``with`` statement, into one file for Perfetto.

    The file has a track for each thread; spans for serializing, transfers, queueing, running, waiting,
    gradients, steps of optimizers, collectives and SPMD programs; and an arrow from each call to its run and
    back. Open it in https://ui.perfetto.dev. Clocks of hosts are aligned by the calls between them; the file
    gives the error under ``metadata``. If a worker cannot be traced, the log says so, and the file has the
    others.

    Args:
        path: the file; it is written at the end, by this worker.

    Raises:
        NotInitializedError: there is no agent.
        ModuleNotFoundError: farcall is not installed as a distribution.

    Example::

        with rpc.trace("run.json"):
            train_one_epoch()
    """
    found = entry_points(_GROUP).select(name=_NAME)
    if not found:
        raise ModuleNotFoundError("nothing is installed that traces: install farcall again (pip install .)")
    tracing: AbstractContextManager[None] = next(iter(found)).load()(path)
    return tracing
