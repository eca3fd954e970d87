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
"""If more than this part of the share is stolen still, it is not for sleeping."""
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


class Wakefulness:
    """Keeps awake, where that helps, the cores from which a process sends messages in quick succession.

    ``stir`` is for any thread, the rest for that of the loop.

    Args:
        spin: keeps a core awake; it may raise ``OSError``.
        core: returns the number of the core that the current thread runs on.
        usage: of all cores, until now.
        soon: has a function called on the loop's thread.
        later: the same, after some seconds.
        clock: in seconds.
    """

    def __init__(
        self,
        spin: Callable[[int], Sleepless],
        core: Callable[[], int],
        usage: Callable[[], Usage],
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
        """``_tick`` is called, or will be; threads may find that late."""
        self._ticking = False
        self._keeps_awake = False
        self._awake: dict[int, _Core] = {}
        self._until = 0.0
        """Until when cores are kept awake, or had better not be."""
        self._period = _SHORTEST_SECONDS
        self._share_asleep = 0.0
        self._before = Usage(0.0, 0.0)
        self._tick_due = 0.0
        self._sum = Usage(0.0, 0.0)

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
            self._ticks = True
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
        self._let_sleep()

    def _begin(self) -> None:
        """Messages follow each other quickly."""
        if self._ticking or self._closed:
            return
        self._ticking = True
        self._before = self._usage()
        self._tick_due = self._clock() + _TICK_SECONDS
        self._later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        if self._closed:
            return
        now = self._clock()
        if now - self._last > _PAUSE_SECONDS:
            self._ticking = self._ticks = False
            self._let_sleep()
            return
        before, self._before = self._before, self._usage()
        if now - self._tick_due < _TICK_SECONDS:  # else this process was stopped, or its loop
            stolen, wanted = self._sum
            self._sum = Usage(
                stolen + self._before.stolen - before.stolen, wanted + self._before.wanted - before.wanted
            )
        self._judge(now)
        for number, core in list(self._awake.items()):
            if now - core.used_at > _PAUSE_SECONDS:
                del self._awake[number]
                core.spinner.stop()
        self._tick_due = now + _TICK_SECONDS
        self._later(_TICK_SECONDS, self._tick)

    def _judge(self, now: float) -> None:
        """Begin or cease to keep cores awake."""
        if self._keeps_awake and now >= self._until:
            self._cease()
            return
        stolen, wanted = self._sum
        if wanted < (_ENOUGH_AWAKE_SECONDS if self._keeps_awake else _ENOUGH_ASLEEP_SECONDS):
            return
        self._sum = Usage(0.0, 0.0)
        share = stolen / wanted
        if self._keeps_awake:
            if share > _HELPFUL * self._share_asleep:
                self._cease()
                self._until = now + _REST_SECONDS
        elif share < _STOLEN_SHARE:
            self._period = _SHORTEST_SECONDS
        elif now >= self._until:
            self._keeps_awake = True
            self._share_asleep = share
            self._until = now + self._period
            self._period = min(2 * self._period, _LONGEST_SECONDS)

    def _cease(self) -> None:
        self._keeps_awake = False
        self._sum = Usage(0.0, 0.0)
        self._let_sleep()

    def _keep_awake(self, number: int) -> None:
        if self._closed or not self._keeps_awake or number in self._awake or len(self._awake) >= _MOST_CORES:
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
