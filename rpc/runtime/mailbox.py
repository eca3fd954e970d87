"""Functions that threads hand over to the loop, and a counter of operations under way."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from rpc.runtime.interrupts import protected
from rpc.runtime.tasks import Task

logger = logging.getLogger(__name__)

_GATHER_SECONDS: Final = 0.005


class Mailbox:
    """Runs functions on the loop's thread soon. Safe to use anywhere, even in finalizers.

    A finalizer may run in the middle of a locked section of ours, on any thread, so nothing here takes a
    lock: functions are put into a ``SimpleQueue``, and the loop is woken once for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._emptied: Callable[[], object] = lambda: None
        self._queue: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._woken = False
        self._timed = False
        self._closed = False

    @protected
    def soon(self, function: Callable[[Any], object], argument: Any) -> None:
        """Run ``function(argument)`` as soon as the loop can."""
        if not self._closed:
            self._queue.put((function, argument))
            if not self._woken:
                self._woken = True
                self.call(self._run)

    @protected
    def gathered(self, function: Callable[[Any], object], argument: Any) -> None:
        """Like ``soon``, but less urgent: it is done together with others that follow in the next moments."""
        if not self._closed:
            self._queue.put((function, argument))
            if not self._timed:
                self._timed = True
                self.call(self._loop.call_later, _GATHER_SECONDS, self._run)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call ``call_soon_threadsafe``; does nothing once the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._closed:
                raise

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function after some time; does nothing once the loop has ended."""
        if not self._closed:
            self.call(self._loop.call_later, seconds, function)

    def when_emptied(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called on the loop's thread each time that the mailbox has become empty."""
        self._emptied = callback

    def pending(self) -> bool:
        """Whether any function waits."""
        return not self._queue.empty()

    def close(self) -> None:
        """Accept no more functions."""
        self._closed = True

    def _run(self) -> None:
        self._woken = self._timed = False
        while not self._queue.empty():
            function, argument = self._queue.get_nowait()
            try:
                function(argument)
            except Exception:
                logger.exception("a deferred action failed")
        self._emptied()


class Counter:
    """Counts operations under way, which may begin and end on different threads."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may use it while it is held
        self.value = 0

    def begin(self) -> None:
        with self._lock:
            self.value += 1

    def end(self) -> None:
        with self._lock:
            self.value -= 1
