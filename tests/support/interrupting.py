"""Signals in a worker's main thread: while it waits, or at any of Python's checks for them."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import pytest

from rpc.runtime import interrupts
from tests.support.leftovers import process_state
from tests.support.streams import until

_AGAIN_SECONDS: Final = 1.0
"""A signal that comes right before a thread falls asleep in a lock is noticed with the next one only."""


def press(number: signal.Signals = signal.SIGINT) -> None:
    """From any thread: what Ctrl-C does to this process, or the same with another signal."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def interrupted(wait: Callable[[], Any], when: Callable[[], object] = lambda: True) -> None:
    """Calls ``wait`` on the main thread, and presses Ctrl-C when that has fallen asleep in it and ``when``
    holds.

    Returns when ``wait`` has raised ``KeyboardInterrupt``. If it waits on, so does this.
    """
    raised, begun = threading.Event(), threading.Event()
    main = threading.get_native_id()

    def press_until_raised() -> None:
        begun.wait()  # before, it may sleep until this thread has started
        until(lambda: when() and process_state(main) == "S")
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


class Interrupted(Exception):
    """Raised by the handler of ``interrupted_at_check``."""


class _Pending:
    __getitem__: Any = _thread.interrupt_main  # see ``rpc.runtime.interrupts``


@interrupts.interruptible
def _call(function: Callable[[], object]) -> None:
    function()


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


@interrupts.protected
def interrupted_at_check(number: int, function: Callable[[], object]) -> bool:
    """Run a function in which SIGUSR1 arrives at Python's ``number``-th check for signals, from 1.

    Returns whether its handler, which raises, has ended the function. Interrupts are deferred meanwhile.
    """
    left, pending = number, _Pending()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def step(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            interrupts._install(number, interrupts._Deferring(interrupt))
        pending[number]

    before = interrupts._install(signal.SIGUSR1, step)
    try:
        signal.raise_signal(signal.SIGUSR1)
        _call(function)
    except Interrupted:
        return True
    finally:
        interrupts._install(signal.SIGUSR1, _ignore)  # for one that is still pending
        interrupts._install(signal.SIGUSR1, before)
    return False
