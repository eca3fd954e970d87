"""A pause of garbage collection, for code that looks at frames of other threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["is_needed", "paused"]

is_needed: Final = sys.version_info < (3, 13)
"""Whether one thread at a time may look at frames: before Python 3.13, reading variables copies them."""


class _Pause:
    """The pause of :func:`paused`; one thread at a time is in it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_begun = False
        self.thresholds: tuple[int, int, int] | None = None

    def begin(self) -> None:
        self.is_begun = True
        if sys.version_info < (3, 12):
            self.thresholds = gc.get_threshold()
            gc.set_threshold(0)

    def end(self) -> None:
        self.is_begun = False
        thresholds, self.thresholds = self.thresholds, None
        if thresholds is not None and gc.get_threshold()[0] == 0:  # else the program has set others meanwhile
            gc.set_threshold(*thresholds)


_pause: Final = _Pause()


def _forked() -> None:
    """The thread that was in the pause does not exist in a forked child."""
    _pause.lock = threading.RLock()
    _pause.end()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def paused() -> Iterator[bool]:
    """While frames of other threads are read, no garbage is collected, where the interpreter collects it at
    allocations; one thread at a time reads them, where that copies variables. Yields whether this is the
    outermost pause of the thread.

    CPython 3.11 allocates an object for a frame that is read. If that collects garbage, a finalizer can let
    the other thread go on and leave the frame, whose memory is then used by others; or two threads wait for
    each other (cpython issues 97002 and 106883). Since 3.12, garbage is collected between instructions only.
    The thresholds are changed, and not the switch of ``gc.disable``, which belongs to the program.
    """
    if not is_needed:
        yield False
        return
    with _pause.lock:
        if _pause.is_begun:  # further out on this thread
            yield False
            return
        try:
            _pause.begin()
            yield True
        finally:
            _pause.end()
