"""Log messages about long waits: after three seconds, and then again at growing intervals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from rpc.runtime.blocking import INFINITE, Event, wait_for_event

logger = logging.getLogger(__name__)

FIRST_SECONDS: Final = 3.0
_LONGEST_SECONDS: Final = 60.0


class Notices:
    """Decides when to log a message about a wait that begins now. For one thread.

    Attributes:
        next: time of the next notice, on the monotonic clock.
        told: number of notices so far.
    """

    def __init__(self) -> None:
        self._began = monotonic()
        self._interval = FIRST_SECONDS
        self.next = self._began + self._interval
        self.told = 0

    def due(self) -> bool:
        """Whether a notice is due; then the interval to the next one is doubled, up to a minute."""
        if monotonic() < self.next:
            return False
        self.told += 1
        self._interval = min(2 * self._interval, _LONGEST_SECONDS)
        self.next = monotonic() + self._interval
        return True

    @property
    def waited(self) -> str:
        """The duration of the wait so far, for messages."""
        return f"{monotonic() - self._began:.0f} s"


def wait_telling(
    event: Event, deadline: float, logger: logging.Logger, tell: Callable[[str], str | None]
) -> bool:
    """Like ``wait_for_event``; during a long wait, the text that ``tell`` returns, if any, is logged."""
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
    """Log which new processes have not started yet; they import what they need."""
    if names:
        logger.warning("%s so far to start %s", waited, ", ".join(names))
