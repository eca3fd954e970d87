"""Ctrl-C in the main thread, at a moment that a test chooses."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from farcall.observe.worker.frames import collection_paused, frames_of_others
from tests.support.streams import until

_PAUSE = 0.02


class CtrlC:
    """Raises one ``KeyboardInterrupt`` in the main thread, however often it takes.

    A signal that comes right before the thread falls asleep in a lock is only noticed when it wakes up; a
    person would press again, and so does this.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._noticed = threading.Event()
        self._noticed.set()

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The handler of ``SIGINT``."""
        if not self._noticed.is_set():
            self._noticed.set()
            raise KeyboardInterrupt

    def press(self) -> None:
        """From another thread: interrupt the main thread."""
        self._noticed.clear()
        while True:
            signal.pthread_kill(self._main, signal.SIGINT)
            if self._noticed.wait(_PAUSE):
                return

    def press_when(self, condition: Callable[[], object]) -> None:
        """The same, as soon as ``condition`` holds."""
        until(condition)
        self.press()

    def press_in(self, function: Callable[..., object]) -> None:
        """The same, as soon as the main thread runs a certain function."""
        code = function.__code__

        def runs() -> bool:
            with collection_paused():
                frame: FrameType | None = frames_of_others()[self._main]
                while frame is not None and frame.f_code is not code:
                    frame = frame.f_back
                return frame is not None

        self.press_when(runs)


def interrupted_at(line: int, function: Callable[[], object], ours: Callable[[str], bool]) -> bool:
    """Run a function and raise ``KeyboardInterrupt`` at the so many-th line of certain files that it runs.

    Args:
        line: counted from 1.
        function: is run on this thread.
        ours: whether the lines of a file count.

    Returns:
        Whether it runs so many.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not ours(frame.f_code.co_filename):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.lstrip().startswith("with "):  # no signal comes right before the exit
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
