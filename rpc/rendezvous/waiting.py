"""Waiting with a deadline, on a thread that can be left behind.

A c10d store waits in C++: Ctrl-C does not reach it, and a server that is stopped or is no store at all
holds it far beyond its timeout. So all that touches a store runs on a helper thread, while the caller waits
for it in Python, where a signal or the deadline ends the wait at once. The helper notices at its next pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rpc.errors import RendezvousTimeoutError

__all__ = ["Abandoned", "Backoff", "OutOfTime", "Waiting", "run_with_deadline"]

T = TypeVar("T")

_GRACE_SECONDS = 2.0
"""How long past the deadline the helper may take to say what was missing."""

_SLICE_SECONDS = 0.2


class OutOfTime(Exception):
    """The deadline has passed. Whoever knows what was waited for turns this into an error for the user."""


class Abandoned(Exception):
    """The caller no longer waits: it was interrupted, or has given up on a store that does not answer."""


class Waiting:
    """A deadline, and pauses that end with it or when nobody waits any longer.

    Args:
        timeout: seconds from now.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._abandoned = threading.Event()

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, never negative."""
        return max(0.0, self._deadline - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Sleep; raises ``Abandoned`` or ``OutOfTime`` as soon as it applies."""
        if self._abandoned.wait(min(seconds, self.remaining)):
            raise Abandoned
        if self.remaining == 0:
            raise OutOfTime

    def abandon(self) -> None:
        """Nobody waits any longer. From any thread."""
        self._abandoned.set()


class Backoff:
    """Pauses that grow by half each time, from one millisecond to a limit.

    Args:
        waiting: whose deadline ends them.
        longest: the limit in seconds.
    """

    def __init__(self, waiting: Waiting, longest: float) -> None:
        self._waiting = waiting
        self._longest = longest
        self._next = 0.001

    def pause(self) -> None:
        """Sleep a little longer than the last time."""
        self._waiting.pause(self._next)
        self._next = min(self._next * 1.5, self._longest)

    def restart(self) -> None:
        """Something happened: be quick again."""
        self._next = 0.001


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None


def run_with_deadline(work: Callable[[Waiting], T], timeout: float, waiting_for: str) -> T:
    """Run ``work`` on a helper thread and return its result, or raise its error, or leave it behind.

    Args:
        work: gets the ``Waiting`` to pause with, and is expected to end when that says so.
        timeout: seconds that it may take.
        waiting_for: names what does not answer, should ``work`` itself be stuck at the deadline.

    Raises:
        RendezvousTimeoutError: ``work`` is stuck. (If it is not, it raises its own, better informed, error.)
    """
    waiting = Waiting(timeout)
    outcome: _Outcome[T] = _Outcome()

    def run() -> None:
        try:
            outcome.value = work(waiting)
        except BaseException as error:
            outcome.error = error
        finally:
            outcome.done.set()

    helper = threading.Thread(target=run, name="rpc-rendezvous", daemon=True)
    try:
        helper.start()
        patience = Waiting(timeout + _GRACE_SECONDS)
        # In slices: a signal that comes just before the thread begins to wait does not wake it.
        while not (finished := outcome.done.wait(_SLICE_SECONDS)) and patience.remaining:
            pass
    finally:
        waiting.abandon()
    if not finished:
        raise RendezvousTimeoutError(
            f"{waiting_for} accepts connections but has not answered for {timeout:g} s. Check that it is a "
            f"c10d store (rank 0 of this job, or torchrun's), not another program that has its port, and "
            f"that its process is not stopped."
        )
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            outcome.error = None  # else error -> traceback -> this frame -> outcome -> error, until collected
    return outcome.value  # type: ignore[return-value]
