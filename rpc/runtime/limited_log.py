"""A rate-limited log, which strangers cannot fill."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

__all__ = ["LimitedLog"]

_BURST: Final = 20
_PER_SECOND: Final = 0.2


class LimitedLog:
    """Passes messages on to a logger: 20 at once, then one every five seconds, with the number of messages
    that were suppressed. On one thread.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._left = float(_BURST)
        self._looked_at = monotonic()
        self._passed_over = 0

    def log(self, level: int, text: str, *values: object) -> None:
        """Like ``Logger.log``."""
        if not self._logger.isEnabledFor(level):
            return
        now = monotonic()
        self._left = min(_BURST, self._left + (now - self._looked_at) * _PER_SECOND)
        self._looked_at = now
        if self._left < 1:
            self._passed_over += 1
            return
        self._left -= 1
        if self._passed_over:
            text, values = f"{text} (and %d more like this)", (*values, self._passed_over)
            self._passed_over = 0
        self._logger.log(level, text, *values)
