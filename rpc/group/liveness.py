"""Decides which workers have been silent for too long. Pure; called periodically with the current time.

Every message from a worker counts as a heartbeat. If a worker is *watched*, because something is on its way
to it or awaited from it, and nothing arrives, it is asked for a heartbeat; it answers on whichever thread
reads its connection, without running user code. A worker that sends none for ``lost_after`` seconds is
silent.

Nothing is done when a heartbeat arrives: heartbeats are counted, and the counts are compared in ``look``. So
the time of the last one is known to within ``interval``, which is added to each observed silence: a silence
is detected within ``lost_after``. Time in which this process was stopped counts as one interval, since what
arrived in the meantime has not been read yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = ["Liveness"]

_LOOKS: Final = 12
_ASK_AFTER: Final = 4
"""Number of intervals that a worker may be silent before it is asked."""


class _Watched:
    __slots__ = ("asked", "signs", "silent")

    def __init__(self, signs: int) -> None:
        self.signs = signs
        self.silent = 0.0
        self.asked = 0.0


class Liveness:
    """Finds silent workers. For one thread.

    Args:
        lost_after: time in seconds after which a worker without heartbeats is silent; 0 for never.

    Attributes:
        interval: time in seconds between two calls of ``look``.

    Example::

        liveness = Liveness(lost_after=30)
        ask, silent = liveness.look(now, {worker: signs_of(worker) for worker in awaited})
    """

    def __init__(self, lost_after: float) -> None:
        self.interval = (lost_after or 30.0) / _LOOKS
        self._bound = lost_after - self.interval if lost_after else math.inf
        self._watched: dict[int, _Watched] = {}
        self._looked = 0.0

    def look(self, now: float, signs: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Return the workers to ask for a heartbeat now, and those that are silent.

        Args:
            signs: total number of heartbeats of each watched worker, by incarnation.
        """
        passed = min(now - self._looked, self.interval)
        self._looked = now
        ask: list[int] = []
        silent: list[int] = []
        for worker in self._watched.keys() - signs.keys():
            del self._watched[worker]
        for worker, count in signs.items():
            watched = self._watched.get(worker)
            if watched is None or watched.signs != count:
                self._watched[worker] = _Watched(count)
                continue
            watched.silent += passed
            if watched.silent >= self._bound:
                silent.append(worker)
            elif watched.silent - watched.asked >= (_ASK_AFTER if watched.asked else 1) * self.interval * 0.9:
                watched.asked = watched.silent
                ask.append(worker)
        return ask, silent

    def excuse(self, worker: int) -> None:
        """Restart the silence of a worker that is known to live."""
        self._watched.pop(worker, None)
