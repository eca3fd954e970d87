"""Telling of waits that last: after three seconds, and then again at growing intervals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from rpc.runtime.blocking import INFINITE, wait_for_event

logger = logging.getLogger(__name__)

FIRST_SECONDS: Final = 3.0
_LONGEST_SECONDS: Final = 60.0


class Notices:
    """When a wait that begins now is to be told of. For one thread.

    Attributes:
        next: the time of the next notice, on the monotonic clock.
        told: number of notices so far.
    """

    def __init__(self) -> None:
        self._began = monotonic()
        self._interval = FIRST_SECONDS
        self.next = self._began + self._interval
        self.told = 0

    def due(self) -> bool:
        """Whether one is due; then the next is due after twice the time, a minute at most."""
        if monotonic() < self.next:
            return False
        self.told += 1
        self._interval = min(2 * self._interval, _LONGEST_SECONDS)
        self.next = monotonic() + self._interval
        return True

    @property
    def waited(self) -> str:
        """How long this has lasted, for people."""
        return f"{monotonic() - self._began:.0f} s"


def wait_telling(
    event: threading.Event, deadline: float, logger: logging.Logger, tell: Callable[[str], str | None]
) -> bool:
    """As ``wait_for_event``; while it lasts, the log gets what ``tell`` says of it, if it does."""
    notices = Notices()
    while not wait_for_event(event, min(deadline, notices.next)):
        if deadline != INFINITE and monotonic() >= deadline:
            return False
        if notices.due():
            said = tell(notices.waited)
            if said is not None:
                logger.warning("%s", said)
    return True


def tell_of_start(names: Sequence[str], waited: str) -> None:
    """Say which new processes have not begun yet; they import what they need."""
    if names:
        logger.warning("%s so far to start %s", waited, ", ".join(names))
