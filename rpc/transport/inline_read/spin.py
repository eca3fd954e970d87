"""Whether a thread that waits looks again and again before it sleeps.

To put a thread to sleep and to wake it takes longer than many calls do, and where both sides sleep, so do
their cores, which take longer still to wake. So a thread spins for a moment, if that has paid lately. Each
time that it does not, it sleeps at once for more of the next waits (exponential backoff); a wait that was
short, asleep or not, takes half of that back. Between two looks the thread yields its core; if it comes back
late, another process or thread needs the core, and the spin is over and has not paid. At most as many threads
of an agent spin at a time as leave one core to others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any, Final

from rpc.runtime.cpu_quota import usable_cores

__all__ = ["MOMENT_SECONDS", "Backoff", "Spinners", "spin"]

MOMENT_SECONDS: Final = 3e-3
"""For how long a thread spins; a wait that is no longer was short."""

_LATE_SECONDS: Final = 0.2e-3
"""If a thread that yields is back so much later only, others need its core."""
_FIRST_PENALTY: Final = 4
_LONGEST_PENALTY: Final = 256

_yield: Final[Callable[[], object]] = getattr(os, "sched_yield", int)


class Backoff:
    """Something that is tried as long as it pays: after each failure it is left alone for longer. Pure.

    An update that is lost, since another thread made one at the same time, does no harm.

    Example::

        if backoff.may_try():
            backoff.paid() if attempt() else backoff.failed()
    """

    __slots__ = ("penalty", "rests")

    def __init__(self) -> None:
        self.penalty = 0
        """How often the last failure made it rest; while 0, ``paid`` changes nothing."""
        self.rests = 0
        """How often it is still to be left alone; while 0, ``may_try`` need not be asked."""

    def may_try(self) -> bool:
        """Whether to try; each refusal counts down."""
        if self.rests <= 0:
            return True
        self.rests -= 1
        return False

    def paid(self) -> None:
        """It has paid: the next failure costs less, and there is less left of the last one."""
        self.penalty //= 2
        self.rests = min(self.rests, self.penalty)

    def failed(self) -> None:
        """It has not paid: leave it alone for a while."""
        self.penalty = min(_LONGEST_PENALTY, max(_FIRST_PENALTY, 2 * self.penalty))
        self.rests = self.penalty


class Spinners:
    """The threads of one agent that spin right now.

    Args:
        limit: how many may; default: one fewer than there are cores.
    """

    __slots__ = ("limit", "threads")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = usable_cores() - 1 if limit is None else limit
        self.threads: dict[int, None] = {}


def spin(poll: Callable[[int], list[Any]], until: float, backoff: Backoff, spinners: Spinners) -> list[Any]:
    """Poll again and again, until there is something to see or ``until`` on the monotonic clock.

    Args:
        poll: called with 0, for how long to wait.
        backoff: told if nothing was seen.
        spinners: whom the current thread joins meanwhile, unless there are enough.

    Returns:
        What was seen; empty if nothing was.
    """
    seen = poll(0)
    if seen or len(spinners.threads) >= spinners.limit:
        return seen
    me = get_ident()
    spinners.threads[me] = None
    try:
        before = monotonic()
        while not seen and before < until:
            _yield()
            seen = poll(0)
            now = monotonic()
            if not seen and now - before > _LATE_SECONDS:
                break
            before = now
    finally:
        spinners.threads.pop(me, None)
    if not seen:
        backoff.failed()
    return seen
