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
from farcall.weights.transfer import Held
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

    def look(last: int | None, serial: int | None, seconds: float) -> Held:
        wanted = Wanted(None, last, serial, seconds, monotonic() + seconds)
        found: Held = by_keeper(lambda handle: handle.look(wanted))
        return found

    def run(last: int | None, serial: int | None) -> None:
        while not ended.is_set():
            try:
                seen = look(last, serial, _LOOK_SECONDS)
            except TimeoutError:
                continue
            except RpcError as error:  # the store is gone, or this worker is leaving
                level = logging.WARNING if isinstance(error, WeightsError) else logging.INFO
                logger.log(level, "no more callbacks for versions of store '%s': %s", name, error)
                return
            last, serial = seen.number, seen.serial
            if ended.is_set():
                return
            try:
                callback(last)
            except Exception:
                logger.exception("the callback for version %d of store '%s' has failed", last, name)

    first: tuple[int | None, int | None] = newer_than, None
    if newer_than is None:
        with contextlib.suppress(TimeoutError):
            there = look(None, None, 0.0)
            first = there.number, there.serial
    threading.Thread(target=run, args=first, name="farcall-weights-follow", daemon=True).start()
    subscription = contextlib.ExitStack()
    subscription.callback(ended.set)
    return subscription
