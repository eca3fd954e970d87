"""The time for which another launcher has written nothing, as far as this process was running."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["Quiet"]

_LONGEST_LOOK_SECONDS: Final = 1.0
"""Maximum time in seconds between two looks that counts as silence."""


class Quiet:
    """Time in seconds for which a value has stayed the same, as far as it was read: a process that was
    stopped for a while (Ctrl-Z) has not read it. For one thread.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._looked_at = time.monotonic()
        self.seconds = 0.0

    def look(self, value: object) -> float:
        """Read the value; returns that time."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_SECONDS), now
        self.seconds = self.seconds + passed if value == self._value else 0.0
        self._value = value
        return self.seconds
