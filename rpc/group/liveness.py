"""Who has been silent for too long: a pure decision, made every now and then. Time is passed in.

Anything that comes from a worker is a sign of life. Where somebody is *watched*, since something is carried
to it or awaited from it, and no sign comes, it is asked for one; it answers on whatever thread reads its
connection, without running code of a user's. Who gives none for ``lost_after`` seconds is silent.

Nothing is noted when a sign comes: signs are counted, and looked at in ``look``. So the time of the last one
is known to within ``interval``, by which a silence is taken to be longer than it was seen to be: it is
noticed within ``lost_after``. Time in which nobody looked, since this very process stood still, counts as one
interval: what has come meanwhile was not taken in yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = ["Liveness"]

_LOOKS: Final = 12
_ASK_AFTER: Final = 4
"""In intervals: how long a worker may say nothing before it is asked."""


class _Watched:
    __slots__ = ("asked", "signs", "silent")

    def __init__(self, signs: int) -> None:
        self.signs = signs
        self.silent = 0.0
        self.asked = 0.0


class Liveness:
    """For one thread.

    Args:
        lost_after: how many seconds a worker may give no sign; 0: for ever.

    Attributes:
        interval: how many seconds pass between two looks.

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
        """Who is to be asked for a sign now, and who is silent.

        Args:
            signs: of each worker that is watched, by incarnation: how many signs have ever come.
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
        """A worker that is silent lives all the same: it may be silent for as long again."""
        self._watched.pop(worker, None)
