"""Callbacks on new versions: a thread that waits for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from farcall.weights.errors import WeightsError
from farcall.weights.handle import Handle, Wanted
from rpc.errors import RpcError

__all__ = ["follow"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 20.0
"""How long a wait takes until it is looked whether the calls have been ended."""

Caller = Callable[[Callable[[Handle], Any]], Any]
"""Makes calls by the handle of the worker that keeps the store now."""


def follow(
    by_keeper: Caller, name: str, callback: Callable[[int], object], newer_than: int | None
) -> contextlib.ExitStack:
    """Call back for each newer version that is seen, until the context manager that is returned is closed."""
    ended = threading.Event()
    last, serial = newer_than, None
    if newer_than is None:
        with contextlib.suppress(TimeoutError):
            seen = by_keeper(lambda handle: handle.look(Wanted()))
            last, serial = seen.number, seen.serial
    thread = threading.Thread(
        target=_run,
        args=(by_keeper, name, callback, last, serial, ended),
        name="farcall-weights-follow",
        daemon=True,
    )
    thread.start()
    subscription = contextlib.ExitStack()
    subscription.callback(ended.set)
    return subscription


def _run(
    by_keeper: Caller,
    name: str,
    callback: Callable[[int], object],
    last: int | None,
    serial: int | None,
    ended: threading.Event,
) -> None:
    while not ended.is_set():
        wanted = Wanted(None, last, serial, _LOOK_SECONDS, monotonic() + _LOOK_SECONDS)
        try:
            seen = by_keeper(lambda handle: handle.look(wanted))  # noqa: B023  # called at once
            last, serial = seen.number, seen.serial
        except TimeoutError:
            continue
        except WeightsError as error:
            logger.warning("no more callbacks for versions of store '%s': %s", name, error)
            return
        except RpcError as error:  # the store is gone, or this worker is leaving
            logger.info("no more callbacks for versions of store '%s': %s", name, error)
            return
        if ended.is_set():
            return
        try:
            callback(last)
        except Exception:
            logger.exception("the callback for version %d of store '%s' has failed", last, name)
