"""Ctrl-C in a worker's main thread while it waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.ctrl_c import CtrlC
from tests.support.leftovers import process_state

__all__ = ["interrupted"]


def interrupted(wait: Callable[[], Any]) -> None:
    """Calls ``wait`` on the main thread, and presses Ctrl-C when that has fallen asleep in it.

    Returns when ``wait`` has raised ``KeyboardInterrupt``. If it waits on, so does this.
    """
    key = CtrlC()
    before = signal.signal(signal.SIGINT, key.handle)
    main = threading.get_native_id()
    with ThreadPoolExecutor(1) as fingers:
        pressing = fingers.submit(key.press_when, lambda: process_state(main) == "S")
        with pytest.raises(KeyboardInterrupt):
            wait()
        pressing.result()
    signal.signal(signal.SIGINT, before)
