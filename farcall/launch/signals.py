"""The signals that a launcher receives: those that end the job, those for its workers, and one that asks what
they do.

The handler only puts a signal into the launcher's queue of news, so that none is lost or comes between two
steps. Because there is a handler, the launcher also reacts as process 1 of a container, for which the kernel
discards signals without one.
"""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

__all__ = ["ASKING", "ENDING", "received_in"]

ENDING: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals that end the job; the workers get the same one."""

ASKING: Final = signal.SIGQUIT
"""Signal that asks what the job does, as on Ctrl-\\."""

_PASSED_ON: Final = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
    signal.SIGURG,
    signal.SIGCONT,
    *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
)
"""Signals that are only passed on, which a scheduler can be asked to send."""


@contextlib.contextmanager
def received_in(news: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Put the number of each received signal into a queue. For the main thread.

    A signal that is ignored, such as SIGHUP under ``nohup``, stays ignored.
    """

    def receive(number: int, _frame: FrameType | None) -> None:
        news.put(number)

    before = {}
    for number in (*ENDING, ASKING, *_PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
