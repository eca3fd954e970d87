"""Signal handlers do not run inside short critical sections of ours.

Python runs the handler of a signal on the main thread, between any two instructions: even between taking a
lock and the ``try`` that releases it. Python's handler of SIGINT raises ``KeyboardInterrupt`` there, and a
program's handlers may raise anything, such as the end of a time limit. So the few functions that must run to
their end are marked ``protected``, and those which block, and may be interrupted even if a protected one
called them, ``interruptible``. While an agent runs, each handler is wrapped in one of ours, which searches
the stack from where the signal arrived: the innermost marked function decides. A mark is a constant in the
function's code, so it costs nothing until a signal arrives. (Source of the idea: Trio, ``_core/_ki.py``.)

Inside a protected function, our handler makes the signal pending again: Python calls it at each of its next
checks for signals, until it may run the program's handler. That is exactly at the end of the section, before
the program goes on; all signals of one number that have arrived in the meantime count as one.

A program may install handlers at any time, and expects to find them as it has installed them. The functions
``signal.signal`` and ``signal.getsignal`` call those of the same names in ``_signal``, which are replaced
while an agent runs: one wraps the handler that it is given, the other returns the wrapped one. A signal that
is ignored, or has its default action, is left alone, and so is one that only wakes an event loop. Wrapping
changes nothing but Python's own table: the system's action stays, which may be a function in C, such as
faulthandler's, or have flags that ``signal.siginterrupt`` has set.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import asyncio.unix_events
import contextlib
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[int, FrameType | None], Any]

_WAKES_LOOP: Final = getattr(asyncio.unix_events, "_sighandler_noop", None)
"""The handler that asyncio installs for ``loop.add_signal_handler``."""

_install: Final[Callable[[int, Any], Any]] = _signal.signal
_installed: Final[Callable[[int], Any]] = _signal.getsignal

_agents = 0
"""Number of agents that need protection. Signals belong to the process, and so does this."""

_ACTION_BYTES: Final = 256
"""More than the size of C's ``struct sigaction``, which has 152 bytes in glibc."""

are_wrapped = False
"""Whether the handlers are wrapped that the program had installed before the first agent began."""


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT for this thread during the block. A process started inside unblocks it when it has set
    what Ctrl-C does there: during the start of the interpreter, it would print a traceback of that start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Mark:
    """Distinguished from all other constants by identity."""


_PROTECTED: Final = _Mark()
_INTERRUPTIBLE: Final = _Mark()


def protected(function: F) -> F:
    """Make ``function`` run to its end: the handler of a signal that arrives in the meantime runs after it.

    It must be short, and must not block or run user code, except through an ``interruptible`` function.

    Example::

        @protected
        def append(self, item):
            self._count += 1
            self._items.append(item)
    """
    return _marked(function, _PROTECTED)


def interruptible(function: F) -> F:
    """Let signal handlers run, and raise, in ``function`` and in what it calls, even if a protected function
    called it.
    """
    return _marked(function, _INTERRUPTIBLE)


def _marked(function: F, mark: _Mark) -> F:
    code = cast("Any", function).__code__
    cast("Any", function).__code__ = code.replace(co_consts=(*code.co_consts, mark))
    return function


def is_interruption(error: BaseException) -> bool:
    """Whether a signal handler has raised this error in a function that the caller has called, or it is a
    ``KeyboardInterrupt``. Code that handles the errors of such a function raises it again: it does not say
    that the function has failed.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is _run.__code__:
            return True
        traceback = traceback.tb_next
    return isinstance(error, KeyboardInterrupt)


def defer_interrupts() -> None:
    """Protect from now on, until ``restore_interrupts`` has been called as often. Handlers that are installed
    are wrapped now, or when the main thread next calls ``ensure_deferred``.
    """
    global _agents
    _agents += 1
    _signal.signal, _signal.getsignal = _set_handler, _get_handler
    try:
        ensure_deferred()
    except BaseException:  # of a handler that is not wrapped yet
        restore_interrupts()
        raise


def restore_interrupts() -> None:
    """Undo one ``defer_interrupts``. The last one restores the handlers, if it is called on the main thread;
    on other threads they stay wrapped.
    """
    global _agents, are_wrapped
    _agents -= 1
    if not _agents and _is_main_thread():
        are_wrapped = False
        for number in _signal.valid_signals():
            found = _installed(number)
            if type(found) is _Deferring:
                _replace(number, found.handler)
        _signal.signal, _signal.getsignal = _install, _installed


def ensure_deferred() -> None:
    """Wrap the handlers if they are not. From any thread; the main one does it."""
    if not are_wrapped and _agents and _is_main_thread():
        _wrap_all()


def _wrap_all() -> None:
    global are_wrapped
    for number in _signal.valid_signals():
        handler = _installed(number)
        if _may_raise(handler):
            _replace(number, _Deferring(handler))
    are_wrapped = True


def _replace(number: int, handler: Handler) -> None:
    """Replace the handler that Python calls, and leave the system's action as it is."""
    sigaction = ctypes.CDLL(None).sigaction
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    sigaction(number, None, action)
    _install(number, handler)
    sigaction(number, action, None)


def _may_raise(handler: Any) -> bool:
    """Whether a handler must be wrapped. Not if it only wakes an event loop, which then calls a callback as
    often as the signal was made pending.
    """
    if not callable(handler) or handler is _WAKES_LOOP or type(handler) is _Deferring:
        return False
    return not isinstance(getattr(handler, "__self__", None), asyncio.AbstractEventLoop)  # uvloop's


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set_handler(signalnum: int, handler: Any, /) -> Any:
    """Does what ``_signal.signal`` does."""
    before = _install(signalnum, _Deferring(handler) if _may_raise(handler) else handler)
    return before.handler if type(before) is _Deferring else before


def _get_handler(signalnum: int, /) -> Any:
    """Does what ``_signal.getsignal`` does."""
    found = _installed(signalnum)
    return found.handler if type(found) is _Deferring else found


class _Deferring:
    """A signal handler that runs another one, outside protected sections."""

    __slots__ = ("_is_paused", "handler")

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._is_paused = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Runs on the main thread, between two instructions of ``frame``."""
        self._is_paused = False
        if not _is_protected(frame):
            _run(self.handler, number, frame)
        elif _STAYS_AT_CHECK and (sys.gettrace() is not None or sys.getprofile() is not None):
            self._is_paused = True
            _thread.start_new_thread(self._go_on, (number,))
        else:
            _PENDING[number]

    def _go_on(self, number: int) -> None:
        time.sleep(_PAUSE_SECONDS)
        if self._is_paused:  # otherwise it has been handled with a later one
            _PENDING[number]


class _Pending:
    """``_PENDING[number]`` makes a signal pending. A subscript and not a call: Python checks for signals
    after each call, and would call our handler again before it has returned.
    """

    __getitem__: Any = _thread.interrupt_main


_PENDING: Final = _Pending()

_STAYS_AT_CHECK: Final = sys.version_info < (3, 12)
"""Whether a traced function, such as a debugger's, does not go on at its beginning while a signal is pending
again and again. There the signal is made pending a moment later.
"""

_PAUSE_SECONDS: Final = 0.001


@interruptible
def _run(handler: Handler, number: int, frame: FrameType | None) -> None:
    handler(number, frame)


def _is_protected(frame: FrameType | None) -> bool:
    while frame is not None:
        for constant in reversed(frame.f_code.co_consts):
            if constant is _PROTECTED:
                return True
            if constant is _INTERRUPTIBLE:
                return False
        frame = frame.f_back
    return False
