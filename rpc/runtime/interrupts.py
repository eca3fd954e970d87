"""``KeyboardInterrupt`` does not interrupt short critical sections of ours.

Python's own handler of SIGINT raises ``KeyboardInterrupt`` on the main thread between any two instructions:
even between taking a lock and the ``try`` that releases it. So the few functions that must run to their end
are marked ``protected``, and those which block, and may be interrupted even if a protected one called them,
``interruptible``. While an agent runs, our handler searches the stack from where the signal arrived: the
innermost marked function decides. Inside a protected one, the signal is sent again a moment later, until it
arrives where it may raise; all that have arrived in the meantime count as one. A mark is a constant in the
function's code, so it costs nothing until a signal arrives. (Source of the idea: Trio, ``_core/_ki.py``.)

Our handler wraps the one that it finds, Python's or the program's, and runs it outside protected sections. A
program may install another one at any time: ipykernel installs Python's before each cell. So functions that
start work on the main thread first call ``ensure_deferred``, which wraps the new one. A signal that is
ignored is left alone, and so is one that asyncio only forwards to a callback of its loop.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import asyncio.unix_events
import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[int, FrameType | None], Any]

_FORWARDS: Final = getattr(asyncio.unix_events, "_sighandler_noop", None)
"""The handler that asyncio installs for ``loop.add_signal_handler``. A signal that is sent again would reach
the callback twice.
"""

_RETRY_SECONDS: Final = 0.001

_SIGINT: Final = int(signal.SIGINT)

_handler_of: Final[Callable[[int], Any]] = _signal.getsignal
"""Returns a signal's handler as the interpreter has it, without ``enum``: in 50 ns, and not in 5 µs."""

_is_deferred = False
"""Whether a signal will be sent again. Signals belong to the process, and so does this."""

_agents = 0
"""Number of agents that need protection."""

_installed: _Deferring | None = None
"""Our handler that was installed last."""


class _Mark:
    """Distinguished from all other constants by identity."""


_PROTECTED: Final = _Mark()
_INTERRUPTIBLE: Final = _Mark()


def protected(function: F) -> F:
    """Make ``function`` run to its end: a ``KeyboardInterrupt`` that arrives in the meantime is raised after
    it.

    It must be short, and must not block or run user code, except through an ``interruptible`` function.

    Example::

        @protected
        def append(self, item):
            self._count += 1
            self._items.append(item)
    """
    return _marked(function, _PROTECTED)


def interruptible(function: F) -> F:
    """Let ``KeyboardInterrupt`` be raised in ``function``, and in what it calls, even if called by a
    protected function.
    """
    return _marked(function, _INTERRUPTIBLE)


def _marked(function: F, mark: _Mark) -> F:
    code = cast("Any", function).__code__
    cast("Any", function).__code__ = code.replace(co_consts=(*code.co_consts, mark))
    return function


def defer_interrupts() -> None:
    """Protect from now on, until ``restore_interrupts`` has been called as often. The handler is installed
    now, or when the main thread next calls ``ensure_deferred``.
    """
    global _agents
    _agents += 1
    ensure_deferred()


def restore_interrupts() -> None:
    """Undo one ``defer_interrupts``. The last one puts the wrapped handler back, if it is called on the main
    thread; on other threads ours stays.
    """
    global _agents
    _agents -= 1
    found = _handler_of(_SIGINT)
    if not _agents and type(found) is _Deferring and _is_main_thread():
        signal.signal(_SIGINT, signal.default_int_handler if _is_over(found.handler) else found.handler)


def _is_over(handler: Handler) -> bool:
    """Whether a handler belongs to an ``asyncio.run`` that has ended. It could not restore Python's handler,
    since ours was installed.
    """
    if not isinstance(handler, functools.partial):
        return False
    task = handler.keywords.get("main_task")
    return isinstance(task, asyncio.Future) and task.done()


def ensure_deferred() -> None:
    """Install the handler again if the program has replaced it. From any thread; the main one installs it."""
    if _handler_of(_SIGINT) is not _installed and _agents:
        _install()


def _install() -> None:
    global _installed
    found = _handler_of(_SIGINT)
    if type(found) is _Deferring:
        _installed = found
    elif callable(found) and found is not _FORWARDS and _is_main_thread():
        _installed = _Deferring(found)
        signal.signal(_SIGINT, _installed)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Deferring:
    """A handler of SIGINT that runs another one, outside protected sections."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Runs on the main thread, between two instructions of ``frame``."""
        global _is_deferred
        _is_deferred = False  # a deferred signal has been handled with this one
        if _is_protected(frame):
            _is_deferred = True
            _thread.start_new_thread(_send_again, ())  # a ``Thread`` takes locks, which this thread may hold
            return
        self.handler(number, frame)


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
    if _is_deferred:  # from here on there is no call, so the handler cannot run in between
        _is_deferred = False
        send(main, number)
