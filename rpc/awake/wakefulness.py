"""When to keep which cores awake. Pure: clock, cores, accounts and spinners are given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final, Protocol

from rpc.awake.accounts import Usage

__all__ = ["Sleepless", "Wakefulness"]

logger = logging.getLogger(__name__)

_MOST_CORES: Final = 2
_PAUSE_SECONDS: Final = 0.05
"""Messages that follow each other within this time do so quickly."""
_TICK_SECONDS: Final = 0.01
"""So often the accounts are read while they do."""
_STOPPED_SECONDS: Final = 0.05
"""Who has not looked for so long was stopped, or was kept from it by other work."""
_MESSAGES: Final = 4
"""How many in quick succession show that others will follow."""
_GRAIN_SECONDS: Final = 50e-6
"""Messages that follow each other faster are noted once."""

_ENOUGH_ASLEEP_SECONDS: Final = 0.15
_ENOUGH_AWAKE_SECONDS: Final = 1.0
"""How much time the cores must have been wanted for the share that was stolen to mean anything."""
_STOLEN_SHARE: Final = 0.15
"""From about this share on a core that sleeps costs more than one that does not."""
_HELPFUL: Final = 0.5
"""If more than this part of what was stolen is stolen still, it is not for sleeping."""
_SHORTEST_SECONDS: Final = 4.0
_LONGEST_SECONDS: Final = 32.0
"""After a time between these it is seen again what is stolen where cores sleep."""
_REST_SECONDS: Final = 60.0
"""For how long cores may sleep if keeping them awake has not helped."""


class Sleepless(Protocol):
    """What keeps a core awake, from when it is made on."""

    def stop(self) -> None: ...


class _Core:
    """A core that is kept awake."""

    __slots__ = ("spinner", "used_at")

    def __init__(self, spinner: Sleepless, used_at: float) -> None:
        self.spinner = spinner
        self.used_at = used_at


class _Sum:
    """What was used in some time.

    Attributes:
        wanted: seconds in which a core ran, or would have.
    """

    __slots__ = ("_elapsed", "_stolen", "wanted")

    def __init__(self) -> None:
        self.wanted = self._stolen = self._elapsed = 0.0

    def add(self, before: Usage, after: Usage, elapsed: float) -> None:
        """Add what was used between two looks; nothing, if the accounts make no sense."""
        stolen, wanted = after.stolen - before.stolen, after.wanted - before.wanted
        if stolen >= 0 and wanted >= 0:
            self._stolen += stolen
            self.wanted += wanted
            self._elapsed += elapsed

    @property
    def share(self) -> float:
        """How much of what was wanted was stolen."""
        return self._stolen / self.wanted

    @property
    def rate(self) -> float:
        """Seconds that were stolen each second."""
        return self._stolen / self._elapsed


class Wakefulness:
    """Keeps awake, where that helps, the cores from which a process sends messages in quick succession.

    ``stir`` is for any thread, the rest for that of the loop.

    Args:
        spin: keeps a core awake; it may raise ``OSError``.
        core: returns the number of the core that the current thread runs on.
        usage: of all cores, until now; None if it cannot be known.
        soon: has a function called on the loop's thread.
        later: the same, after some seconds.
        clock: in seconds.
    """

    def __init__(
        self,
        spin: Callable[[int], Sleepless],
        core: Callable[[], int],
        usage: Callable[[], Usage | None],
        soon: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._spin = spin
        self._core = core
        self._usage = usage
        self._soon = soon
        self._later = later
        self._clock = clock
        self._closed = False
        self._last = clock() - 1.0
        self._in_succession = 0
        self._ticks = False
        self._keeps_awake = False
        self._awake: dict[int, _Core] = {}
        self._until = 0.0
        """Until when cores are kept awake, or had better not be."""
        self._period = _SHORTEST_SECONDS
        self._rate_asleep = 0.0
        self._before: Usage | None = None
        self._ticked_at = 0.0
        self._sum = _Sum()

    def stir(self) -> None:
        """A message is being sent from the core that the current thread runs on."""
        now = self._clock()
        pause = now - self._last
        if pause < _GRAIN_SECONDS:
            return
        self._last = now
        if pause > _PAUSE_SECONDS:
            self._in_succession = 0
        elif self._in_succession < _MESSAGES:
            self._in_succession += 1
        elif not self._ticks:
            self._soon(self._begin)
        elif self._keeps_awake:
            number = self._core()
            core = self._awake.get(number)
            if core is not None:
                core.used_at = now
            elif len(self._awake) < _MOST_CORES:
                self._soon(partial(self._keep_awake, number))

    def close(self) -> None:
        """Let all sleep, for good."""
        self._closed = True
        self._keeps_awake = False
        self._let_sleep()

    def _begin(self) -> None:
        """Messages follow each other quickly."""
        if self._ticks or self._closed:
            return
        self._ticks = True
        self._before, self._ticked_at = self._usage(), self._clock()
        self._later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        goes_on = False
        try:
            goes_on = not self._closed and self._look(self._clock())
        finally:
            self._ticks = goes_on
            if goes_on:
                self._later(_TICK_SECONDS, self._tick)
            else:
                self._let_sleep()

    def _look(self, now: float) -> bool:
        """See what was used since the last time; returns false if no messages follow."""
        if now - self._last > _PAUSE_SECONDS:
            return False
        before, self._before = self._before, self._usage()
        elapsed, self._ticked_at = now - self._ticked_at, now
        if elapsed < _STOPPED_SECONDS and before is not None and self._before is not None:
            self._sum.add(before, self._before, elapsed)
        self._judge(now)
        for number, core in list(self._awake.items()):
            if now - core.used_at > _PAUSE_SECONDS:
                del self._awake[number]
                core.spinner.stop()
        return True

    def _judge(self, now: float) -> None:
        """Begin or cease to keep cores awake."""
        if self._keeps_awake and now >= self._until:
            self._cease()
            return
        found = self._sum
        if found.wanted < (_ENOUGH_AWAKE_SECONDS if self._keeps_awake else _ENOUGH_ASLEEP_SECONDS):
            return
        self._sum = _Sum()
        if self._keeps_awake:
            if found.rate > _HELPFUL * self._rate_asleep:
                self._cease()
                self._until = now + _REST_SECONDS
        elif found.share < _STOLEN_SHARE:
            self._period = _SHORTEST_SECONDS
        elif now >= self._until:
            self._keeps_awake = True
            self._rate_asleep = found.rate
            self._until = now + self._period
            self._period = min(2 * self._period, _LONGEST_SECONDS)

    def _cease(self) -> None:
        self._keeps_awake = False
        self._sum = _Sum()
        self._let_sleep()

    def _keep_awake(self, number: int) -> None:
        if not self._ticks or not self._keeps_awake:
            return
        if number in self._awake or len(self._awake) >= _MOST_CORES:
            return
        try:
            spinner = self._spin(number)
        except OSError as error:
            logger.info("cores are not kept awake between messages: %s", error)
            self._cease()
            self._until = self._clock() + _REST_SECONDS
            return
        self._awake[number] = _Core(spinner, self._clock())

    def _let_sleep(self) -> None:
        for core in self._awake.values():
            core.spinner.stop()
        self._awake.clear()
