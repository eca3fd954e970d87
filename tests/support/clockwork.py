"""Time that a test moves: a clock, and as much of an asyncio loop as timers need."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """A timer handle that can only be cancelled."""

    def __init__(self, rings_at: float, callback: Callable[[], object]) -> None:
        self.rings_at = rings_at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __lt__(self, other: Timer) -> bool:
        return self.rings_at < other.rings_at


class Clockwork:
    """A loop and a clock that move only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []
        self.soon: list[Callable[[], object]] = []
        self.woken = 0

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> None:
        self.woken += 1
        self.call_soon(callback, *arguments)

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        self.soon.append(functools.partial(callback, *arguments))

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        assert delay >= 0
        timer = Timer(self.now + delay, callback)
        heapq.heappush(self.timers, timer)
        return timer

    def ringing(self) -> list[float]:
        return sorted(timer.rings_at - 1000 for timer in self.timers if not timer.cancelled)

    def advance(self, seconds: float) -> None:
        """Let that much time pass, and everything happen that is due."""
        end = self.now + seconds
        while True:
            soon, self.soon = self.soon, []
            for callback in soon:
                callback()
            if self.timers and self.timers[0].rings_at <= end:
                timer = heapq.heappop(self.timers)
                self.now = max(self.now, timer.rings_at)
                if not timer.cancelled:
                    timer.callback()
            elif not self.soon:
                break
        self.now = end
