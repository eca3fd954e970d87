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
        self._seen: dict[str, tuple[int, int]] = {}
        self._began = time.time()

    def on(self, name: str, handler: Callable[[dict[str, Any]], object]) -> None:
        """Call ``handler`` with each order of a name, on the observing thread."""
        self._handlers[name] = handler

    def look(self, folder: Path) -> None:
        """Follow new orders. Costs one call of ``stat`` for each name if there are none."""
        for name, handler in list(self._handlers.items()):
            path = folder / f"{name}{_SUFFIX}"
            try:
                found = os.stat(path, follow_symlinks=False)
            except OSError:  # none was given
                continue
            if self._seen.get(name) == (found.st_ino, found.st_mtime_ns):
                continue
            order = read_facts(path)
            if order:  # otherwise it is read again: there may have been no descriptor for it
                self._seen[name] = found.st_ino, found.st_mtime_ns
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
