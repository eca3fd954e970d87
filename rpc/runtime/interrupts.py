"""Ctrl-C does not tear short sections of ours.

Python's own handler of SIGINT raises ``KeyboardInterrupt`` on the main thread between any two instructions:
also between taking a lock and the ``try`` that lets go of it. So the few functions that must run to their end
are marked ``protected``, and those which block, and may be interrupted although a protected one called them,
``interruptible``. While an agent runs, our handler looks up the stack from where the signal came: the
innermost marked function decides. Below a protected one the signal is sent again a moment later, until it
comes where it may raise; all that have come meanwhile count as one. A mark is a constant in the function's
code, so it costs nothing until a signal comes. (Source of the idea: Trio, ``_core/_ki.py``.)

This stands in for Python's default handler only: not for one that a program has installed, nor where the
agent is started on another thread than the main one.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_RETRY_SECONDS: Final = 0.001

_is_deferred = False
"""Whether a signal is to be sent again. Signals belong to the process, and so does this."""


class _Mark:
    """Told from all other constants by identity."""


_PROTECTED: Final = _Mark()
_INTERRUPTIBLE: Final = _Mark()


def protected(function: F) -> F:
    """Have ``function`` run to its end: a Ctrl-C that comes meanwhile is raised after it.

    It must be short, and must not block or run code of the user's but through an ``interruptible`` function.

    Example::

        @protected
        def append(self, item):
            self._count += 1
            self._items.append(item)
    """
    return _marked(function, _PROTECTED)


def interruptible(function: F) -> F:
    """Let Ctrl-C be raised in ``function``, and what it calls, also when a protected function called it."""
    return _marked(function, _INTERRUPTIBLE)


def _marked(function: F, mark: _Mark) -> F:
    code = cast("Any", function).__code__
    cast("Any", function).__code__ = code.replace(co_consts=(*code.co_consts, mark))
    return function


def defer_interrupts() -> bool:
    """Install the handler; returns whether it is ours that is to be ``restore``d."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, _interrupted)
    return True


def restore_interrupts() -> None:
    """Put Python's handler back, if ours is installed. Only the main thread can; on others it stays."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is _interrupted
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """The handler. It runs on the main thread, between two instructions of ``frame``."""
    global _is_deferred
    _is_deferred = False  # what was, has come with this one
    if _is_protected(frame):
        _is_deferred = True
        _thread.start_new_thread(_send_again, ())  # a ``Thread`` takes locks, which this thread may hold
        return
    signal.default_int_handler(number, frame)


def _is_protected(frame: FrameType | None) -> bool:
    while frame is not None:
        for constant in reversed(frame.f_code.co_consts):
            if constant is _PROTECTED:
                return True
            if constant is _INTERRUPTIBLE:
                return False
        frame = frame.f_back
    return False


def _send_again() -> None:
    global _is_deferred
    time.sleep(_RETRY_SECONDS)
    main, send, number = threading.main_thread().ident or 0, signal.pthread_kill, signal.SIGINT
    if _is_deferred:  # from here on there is no call, so the handler does not come between
        _is_deferred = False
        send(main, number)
