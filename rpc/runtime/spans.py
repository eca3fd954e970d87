"""Spans: time intervals of a thread's work, reported to listeners when they end. For traces.

Code that should appear in traces uses::

    with spans.span("optimizer step", parameters=12):
        step()

Without a listener, that costs one test of a tuple. Waits of ``rpc.runtime.waits`` are reported, too. A span
with the details ``source`` and ``call`` serves that request: a trace draws the call's arrow to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Self

__all__ = ["Span", "is_listened_to", "listen", "span", "tell"]


@dataclass(slots=True, eq=False)
class Span:
    """A span of the thread that enters and leaves it. A context manager.

    Attributes:
        name: what the thread did.
        details: numbers and short texts.
        began, ended: on the monotonic clock, in seconds.
        thread: identifier of the thread.
        waits: whether the thread waited for other workers.
    """

    name: str
    details: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    ended: float = 0.0
    thread: int = 0
    waits: bool = False

    def __enter__(self) -> Self:
        self.began = monotonic()
        self.thread = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = monotonic()
        tell(self)


_listeners: Final[dict[object, Callable[[Span], object]]] = {}
"""The listeners, by registration. Changed in single steps, without a lock, as a finalizer may end one."""
_NOTHING: Final = nullcontext()


def is_listened_to() -> bool:
    """Whether there is a listener."""
    return bool(_listeners)


def span(name: str, **details: Any) -> AbstractContextManager[object]:
    """Return a span for the duration of a ``with`` statement, if there is a listener."""
    return Span(name, details) if _listeners else _NOTHING


def tell(ended: Span) -> None:
    """Report a span that has ended to the listeners."""
    for listener in tuple(_listeners.values()):
        listener(ended)


def listen(listener: Callable[[Span], object]) -> ExitStack:
    """Have ``listener`` called with each span of this process that ends, on its thread; it must be quick.

    Returns:
        A context manager that ends the registration, on ``close()`` or at the end of a ``with`` statement.
    """
    registration = object()
    _listeners[registration] = listener
    subscription = ExitStack()
    subscription.callback(_listeners.pop, registration, None)
    return subscription
