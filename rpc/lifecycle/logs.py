"""``FARCALL_LOG``: what the log shows, where a program has not said so itself.

A line stands alone: it has the time, the worker's name, and what happened. ``FARCALL_LOG=info`` shows who
leaves, ``debug`` the group's life: who joins and connects, by what, and the tracebacks of what callees raise.
Calls that go well are in no log; for them there is ``rpc.events``.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from rpc.errors import InvalidOptionError

__all__ = ["show_log"]

_PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
_LEVELS: Final = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error; known by its class, so that it is added once."""


def show_log(worker: str) -> None:
    """Have the log shown as ``FARCALL_LOG`` says; nothing is done where it is not set.

    Args:
        worker: the name of this worker.

    Raises:
        InvalidOptionError: it is no level.
    """
    asked = os.environ.get("FARCALL_LOG", "").lower()
    if not asked:
        return
    if asked not in _LEVELS:
        raise InvalidOptionError(f"FARCALL_LOG is one of {', '.join(_LEVELS)}, not {asked!r}")
    formatter = logging.Formatter(f"%(asctime)s {worker} %(levelname)s %(message)s")
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(_LEVELS[asked])
        handler = next((each for each in logger.handlers if isinstance(each, _Handler)), None)
        if handler is None:
            handler = _Handler()
            logger.addHandler(handler)
            logger.propagate = False  # else a program's own handler would say it twice
        handler.setFormatter(formatter)
