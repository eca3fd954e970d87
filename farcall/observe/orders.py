"""Orders to the workers of a job on this host: files in the job's folder that its workers look for.

An order is a JSON file ``<name>.order`` with a number that grows each time that it is given. Each worker
finds it at its next look, and calls the handler of that name once for each number. No connection is made, and
no port is opened.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["Orders", "give_order"]

logger = logging.getLogger(__name__)

_SUFFIX: Final = ".order"
_MAX_BYTES: Final = 1 << 16


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
            order = _read(folder / f"{name}{_SUFFIX}")
            given = order.get("given", 0.0) if order else 0.0
            if order and isinstance(given, int | float) and given > self._done.get(name, self._began):
                self._done[name] = given
                try:
                    handler(order)
                except Exception:
                    logger.exception("following the order '%s' failed", name)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(file).st_uid != os.getuid():
            return None
        found = json.loads(os.read(file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(file)
    return found if isinstance(found, dict) else None


def give_order(folder: Path, name: str, **facts: Any) -> None:
    """Give an order to all workers of a job on this host."""
    written = folder / f".{name}.{os.getpid()}"
    text = json.dumps({"given": time.time(), **facts})
    written.write_text(text)
    written.chmod(0o600)
    written.replace(folder / f"{name}{_SUFFIX}")
