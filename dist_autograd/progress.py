"""The states of one backward pass on one worker, the events in each, and the resulting actions.

At a worker that is not the root, a backward pass is MARKED while the root finds out what takes part. It is
RUNNING once the root says that all is marked, and at the root itself from the beginning. The thread that runs
it raises the first error, wherever that came from; both ways end in OVER.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Final

from rpc.runtime import blocking
from rpc.runtime.interrupts import protected

__all__ = ["TRANSITIONS", "Action", "Error", "Event", "Progress", "State"]

Error = Callable[[], BaseException]
"""Makes an error, on the thread that raises it: loading it may run code of the user's."""

State = enum.IntEnum("State", ["MARKED", "RUNNING", "FAILING", "OVER"])
Event = enum.IntEnum("Event", ["BEGIN", "NEWS", "FAIL", "END"])
Action = enum.IntEnum("Action", ["NOTHING", "START", "WAKE", "FORGET"])
"""The reporter's duty after an event, except for WAKE, which is done: it wakes the thread that runs it."""

TRANSITIONS: Final[dict[tuple[State, Event], tuple[State, Action]]] = {
    (State.MARKED, Event.BEGIN): (State.RUNNING, Action.START),
    (State.MARKED, Event.FAIL): (State.OVER, Action.FORGET),
    (State.RUNNING, Event.NEWS): (State.RUNNING, Action.WAKE),
    (State.RUNNING, Event.FAIL): (State.FAILING, Action.WAKE),
    (State.RUNNING, Event.END): (State.OVER, Action.FORGET),
    (State.FAILING, Event.END): (State.OVER, Action.FORGET),
}
"""Events that are not listed change nothing: they may come early or late, and only the first error counts."""


class Progress:
    """The state of a backward pass. ``wait`` is for the thread that runs it, everything else for
    any thread.
    """

    def __init__(self) -> None:
        self.state = State.MARKED
        self._error: Error | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may leave the context while it is held
        self._news: blocking.Event | None = None

    @protected
    def on(self, event: Event, error: Error | None = None) -> Action:
        """Handle an event.

        Args:
            event: the event.
            error: the error, for ``FAIL``.
        """
        with self._lock:
            self.state, action = TRANSITIONS.get((self.state, event), (self.state, Action.NOTHING))
            if error is not None and self._error is None:
                self._error = error
        if action is Action.WAKE and self._news is not None:  # otherwise no thread has waited yet
            self._news.set()
        return action

    def check(self) -> None:
        """Raise the error that ended the backward pass, if any."""
        if self._error is not None:
            raise self._error()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block until an event or an error, unless ``ready`` is true already."""
        if self._news is None:
            self._news = blocking.Event()
        self._news.clear()
        if not ready() and self._error is None:
            blocking.wait_for_event(self._news)
