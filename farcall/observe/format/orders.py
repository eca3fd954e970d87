"""Orders to the workers of a job on this host: files in the job's folder that its workers look for.

An order is a JSON file ``<name>.order`` with a number that grows each time that it is given. Each worker
finds it at its next look, and calls the handler of that name once for each number. No connection is made, and
no port is opened.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from farcall.observe.format.job_files import read_facts, write_facts

__all__ = ["Orders", "give_order"]

logger = logging.getLogger(__name__)

_SUFFIX: Final = ".order"


class Orders:
    """The orders that one worker follows. ``on`` may be called from any thread, ``look`` from one."""

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[[dict[str, Any]], object]] = {}
        self._done: dict[str, float] = {}
        self._folder: Path | None = None
        self._changed = 0
        self._began = time.time()

    def on(self, name: str, handler: Callable[[dict[str, Any]], object]) -> None:
        """Call ``handler`` with each order of a name, on the observing thread."""
        self._handlers[name] = handler
        self._changed = 0

    def look(self, folder: Path) -> None:
        """Follow new orders. Costs one call of ``stat`` if there are none."""
        try:
            changed = os.stat(folder).st_mtime_ns
        except FileNotFoundError:  # the files have just been moved
            return
        if folder == self._folder and changed == self._changed:
            return
        self._folder, self._changed = folder, changed
        for name, handler in list(self._handlers.items()):
            order = read_facts(folder / f"{name}{_SUFFIX}")
            given = order.get("given", 0.0)
            if isinstance(given, int | float) and given > self._done.get(name, self._began):
                self._done[name] = given
                try:
                    handler(order)
                except Exception:
                    logger.exception("following the order '%s' failed", name)


def give_order(folder: Path, name: str, **facts: Any) -> None:
    """Give an order to all workers of a job on this host."""
    write_facts(folder / f"{name}{_SUFFIX}", {"given": time.time(), **facts})
