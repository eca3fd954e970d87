"""Whether another launcher lives: what it has written last, and for how long it has written nothing new."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from farcall.launch.rounds import SILENT_SECONDS, State

__all__ = ["Heard", "Quiet"]

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


class Heard:
    """The records of another launcher, and for how long it has written nothing."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self._beat = 0
        self._quiet = Quiet()

    def hear(self, packed: bytes | None) -> None:
        """Handle what it has written last."""
        if packed is not None:
            found = json.loads(packed)
            self.said, self._beat = found["said"], found["beat"]
        self._quiet.look(self._beat)

    @property
    def has_left(self) -> bool:
        """Whether it is gone, or leaving, before the job has begun."""
        leaves = bool(self.said) and (self.said["leaves"] or self.said["state"] == State.LEFT)
        return bool(leaves) or self.silent_for > SILENT_SECONDS

    @property
    def silent_for(self) -> float:
        """Time in seconds since its last sign of life."""
        return self._quiet.seconds
