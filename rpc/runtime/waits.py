"""Waits that a stack does not explain: operations of a group, and the workers that each still waits for.

Code that waits for other workers in another way than by a call reports it::

    with waits.waiting("barrier", lambda: missing):
        complete.wait()

Observers read ``waits.current()``, from any thread. An entry costs less than a microsecond; the function that
names the workers is only called by observers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

from rpc.runtime import spans

__all__ = ["Waiting", "current", "waiting"]


@dataclass(slots=True, eq=False)
class Waiting:
    """A wait of one thread. A context manager.

    Attributes:
        what: the operation: "barrier", "shutdown", "all_reduce".
        whom: returns the names of the workers that the thread still waits for; called on any thread.
        details: data for observers: numbers and short texts.
        since: start of the wait, on the monotonic clock.
        thread: identifier of the waiting thread.
    """

    what: str
    whom: Callable[[], Iterable[str]] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0
    thread: int = 0

    def __enter__(self) -> Self:
        self.since = monotonic()
        self.thread = threading.get_ident()
        _current[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.pop(id(self), None)
        if spans.is_listened_to():
            spans.tell(spans.Span(self.what, self.details, self.since, monotonic(), self.thread, waits=True))


_current: Final[dict[int, Waiting]] = {}


def waiting(what: str, whom: Callable[[], Iterable[str]] | None = None, **details: Any) -> Waiting:
    """Record what the current thread waits for, for the duration of a ``with`` statement."""
    return Waiting(what, whom, details)


def current() -> list[Waiting]:
    """Return all current waits of this process, the oldest first."""
    return list(_current.copy().values())
