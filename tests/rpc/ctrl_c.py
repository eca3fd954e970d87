"""Ctrl-C in the main thread, at a moment that a test chooses."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from tests.rpc.streams import until

__all__ = ["CtrlC"]

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
            frame: FrameType | None = sys._current_frames()[self._main]
            while frame is not None and frame.f_code is not code:
                frame = frame.f_back
            return frame is not None

        self.press_when(runs)
