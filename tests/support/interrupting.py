"""Ctrl-C in a worker's main thread while it waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.support.leftovers import process_state
from tests.support.streams import until

_AGAIN_SECONDS: Final = 1.0
"""A signal that comes right before a thread falls asleep in a lock is noticed with the next one only."""


def press(number: signal.Signals = signal.SIGINT) -> None:
    """From any thread: what Ctrl-C does to this process, or the same with another signal."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def interrupted(wait: Callable[[], Any]) -> None:
    """Calls ``wait`` on the main thread, and presses Ctrl-C when that has fallen asleep in it.

    Returns when ``wait`` has raised ``KeyboardInterrupt``. If it waits on, so does this.
    """
    raised, begun = threading.Event(), threading.Event()
    main = threading.get_native_id()

    def press_until_raised() -> None:
        begun.wait()  # before, it may sleep until this thread has started
        until(lambda: process_state(main) == "S")
        press()
        while not raised.wait(_AGAIN_SECONDS):
            press()

    def begin() -> None:
        begun.set()
        wait()

    thread = threading.Thread(target=press_until_raised)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        begin()
    raised.set()
    thread.join()
