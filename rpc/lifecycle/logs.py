"""``FARCALL_LOG``: the log level, for programs that do not configure logging themselves.

Each line is self-contained: it has the time, the worker's name, and what happened. ``FARCALL_LOG=info`` shows
which workers leave, ``debug`` the group's history: which workers join and connect, by which transport, and
the tracebacks of errors that callees raise. Successful calls are not logged; for them there is
``rpc.events``.
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
    """Writes to standard error; recognized by its class, so that it is added once."""


def show_log(worker: str) -> None:
    """Configure the log as ``FARCALL_LOG`` says; does nothing if it is not set.

    Args:
        worker: name of this worker.

    Raises:
        InvalidOptionError: its value is not a level.
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
            logger.propagate = False  # or a program's own handler would print lines twice
        handler.setFormatter(formatter)
