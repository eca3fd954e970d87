"""Calls that have had no answer for long are reported in the log.

A timer on the loop checks the table of calls: nothing is done when a call is made. An observer may find out
what such calls wait for; then it reports them. It also gets calls shortly before their timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rpc.agent.calls import CallTable, PendingCall
from rpc.group.peer import PeerTable
from rpc.runtime.legible import legible

__all__ = ["Due", "Schedule", "SlowCalls"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
"""Interval in seconds at which the table of calls is checked."""

_IDLE_LOOK_SECONDS: Final = 0.5
"""Interval in seconds if there are no calls."""

_MAX_LOOK_SECONDS: Final = 2.5
_CALLS_PER_SECOND: Final = 4000
"""In a long table, number of calls checked per second, within the maximum interval."""

_MAX_REPORTS: Final = 8
"""Maximum number of calls that are reported after one look."""

_FIRST_SHARE: Final = 0.8
_LAST_SECONDS: Final = 0.5
"""A call with a timeout is due after this share of the timeout, and this long before its end at the latest,
in seconds."""

_SHORTEST_TIMEOUT: Final = 2.0
"""Shortest timeout of calls that are due before it ends, in seconds."""


@dataclass(frozen=True, slots=True)
class Due:
    """A call that has had no answer for long.

    Attributes:
        age: seconds since the call was made, to within one look.
        report: whether to log it; otherwise what it waits for is only for the error of its timeout.
    """

    call: PendingCall
    age: float
    report: bool


@dataclass(slots=True)
class _Entry:
    began: float
    report_at: float
    interval: float
    ask_at: float


class Schedule:
    """Decides when which call is due. A call is not timed when it is made: one without a timeout is
    considered to have begun when it was first seen by ``look``. Pure.

    Args:
        bound: age of a call at its first report, in seconds; the following intervals double.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._entries: dict[int, _Entry] = {}

    def look(self, now: float, calls: Iterable[PendingCall], slack: float) -> list[Due]:
        """Return the calls that are due, of all that are under way.

        Args:
            slack: time in seconds until the next look.
        """
        before, self._entries = self._entries, {}
        due: list[Due] = []
        for call in calls:
            if call.keeps_place:
                continue  # no thread waits for it: a call that waits for its object is under way too
            entry = before.get(call.call_id) or self._enter(now, call)
            self._entries[call.call_id] = entry
            report = now >= entry.report_at
            if report:
                entry.interval *= 2
                entry.report_at = now + entry.interval
            ask = now + slack > entry.ask_at
            if ask:
                entry.ask_at = float("inf")
            if report or ask:
                due.append(Due(call, now - entry.began, report))
        return due

    def _enter(self, now: float, call: PendingCall) -> _Entry:
        began, ask_at = now, float("inf")
        if call.timeout:
            began = call.deadline - call.timeout
            if call.timeout >= _SHORTEST_TIMEOUT:
                ask_at = began + min(call.timeout * _FIRST_SHARE, call.timeout - _LAST_SECONDS)
        return _Entry(began, began + self._bound, self._bound, ask_at)


class SlowCalls:
    """Reports the calls without an answer; on the loop's thread.

    Args:
        bound: age of a call at its first report, in seconds; 0 to report none.

    Attributes:
        explain: finds out what calls wait for, and reports them; None: each has a line in the log.
    """

    def __init__(
        self, calls: CallTable, peers: PeerTable, loop: asyncio.AbstractEventLoop, bound: float
    ) -> None:
        self.explain: Callable[[list[Due]], object] | None = None
        self._calls = calls
        self._peers = peers
        self._loop = loop
        self._bound = bound
        self._schedule = Schedule(bound)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start checking the table of calls."""
        if self._bound:
            count = len(self._calls)
            interval = min(_LOOK_SECONDS if count else _IDLE_LOOK_SECONDS, self._bound / 4)
            interval = max(interval, min(_MAX_LOOK_SECONDS, count / _CALLS_PER_SECOND))
            self._timer = self._loop.call_later(interval, self._look, interval)

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, interval: float) -> None:
        self.begin()
        under_way = self._calls.waiting() if len(self._calls) else ()
        due = self._schedule.look(self._loop.time(), under_way, interval)
        due = [each for each in due if each.call.peer.lost is None]
        named = due[:_MAX_REPORTS]
        me = self._peers.own.name
        if self.explain is None:
            for each in named:
                if each.report:
                    callee, asked = each.call.peer.name, legible(each.call.asked)
                    logger.warning("%s has had no answer for %.3g s from %s: %s", me, each.age, callee, asked)
        elif named:
            self.explain(named)
        if more := sum(each.report for each in due[_MAX_REPORTS:]):
            logger.warning("%s: %d more calls have no answer yet", me, more)
