"""Callbacks for workers that join or are lost: ``rpc.on_worker_joined`` and ``rpc.on_worker_lost``.

Callbacks run on a thread of their own, ``farcall-watch``, one at a time: events in the order in which this
worker noticed them, and for each event the callbacks in the order of registration. So they may block and make
calls; their exceptions are logged. There are no events about this worker itself, and none after ``shutdown``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final

from rpc.agent.departure import SHUT_DOWN, Departure
from rpc.agent.hooks import Hooks
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo

__all__ = ["on_worker_joined", "on_worker_lost", "watch"]

logger = logging.getLogger(__name__)

_joined: Final[list[Callable[..., object]]] = []
_lost: Final[list[Callable[..., object]]] = []


def on_worker_joined(callback: Callable[[WorkerInfo], object]) -> ExitStack:
    """Have ``callback(worker)`` called for each other worker that becomes known from now on.

    A callback registered before ``init_rpc`` is called for every worker; one registered after it, only for
    those that join later (``get_worker_infos`` has the others). It stays registered for later groups of this
    process.

    Args:
        callback: called on a separate thread, one at a time; it may make calls. Its exceptions are logged.

    Returns:
        A context manager that ends the registration, on ``close()`` or at the end of a ``with`` statement.

    Example::

        rpc.on_worker_joined(lambda worker: print(worker.name, "is here"))
    """
    return _register(_joined, callback)


def on_worker_lost(callback: Callable[[WorkerInfo, str], object]) -> ExitStack:
    """Have ``callback(worker, reason)`` called for each other worker that is lost for good from now on: it
    left, died or was cut off, as ``reason`` says. A worker that comes back under its name joins as a new one.
    While this worker itself is in ``shutdown``, others that have shut down in the same way are not reported.

    Arguments and value as for ``on_worker_joined``.

    Example::

        rpc.on_worker_lost(lambda worker, reason: print(worker.name, "is gone:", reason))
    """
    return _register(_lost, callback)


def _register(callbacks: list[Callable[..., object]], callback: Callable[..., object]) -> ExitStack:
    if not callable(callback):
        raise TypeError(f"callback must be callable, not {callback!r}")

    def called(*told: Any) -> None:  # a separate object, so that one callback may be registered twice
        callback(*told)

    def end() -> None:
        if called in callbacks:
            callbacks.remove(called)

    callbacks.append(called)
    subscription = ExitStack()
    subscription.callback(end)
    return subscription


def watch(hooks: Hooks, departure: Departure) -> None:
    """Report the workers of an agent that has not joined its group yet."""
    told: queue.SimpleQueue[tuple[list[Callable[..., object]], tuple[Any, ...]] | None] = queue.SimpleQueue()
    closed = threading.Event()
    thread = threading.Thread(target=_tell, args=(told, closed), name="farcall-watch", daemon=True)

    def note(callbacks: list[Callable[..., object]], *what: Any) -> None:
        now = list(callbacks)
        if now:
            told.put((now, what))
            if thread.ident is None:
                with suppress(
                    RuntimeError
                ):  # the system has no more threads just now: the next one tries again
                    thread.start()

    def joined(peer: Peer) -> None:
        if not peer.is_self:
            note(_joined, peer.member.info)

    def gone(peer: Peer, reason: str) -> None:
        if not (departure.begun and reason == SHUT_DOWN):
            note(_lost, peer.member.info, reason)

    def close() -> None:
        closed.set()
        told.put(None)

    hooks.joined.append(joined)
    hooks.gone.append(gone)
    hooks.close.append(close)


def _tell(
    told: queue.SimpleQueue[tuple[list[Callable[..., object]], tuple[Any, ...]] | None],
    closed: threading.Event,
) -> None:
    while (what := told.get()) is not None and not closed.is_set():
        callbacks, arguments = what
        for callback in callbacks:
            try:
                callback(*arguments)
            except BaseException:  # even ``sys.exit()`` would only end this thread, silently
                logger.exception("a callback of on_worker_joined or on_worker_lost failed")
