"""Preemption: an engine takes the machines of a job away, and announces that by a signal.

Slurm sends SIGTERM before it preempts a job or ends it at its time limit, and other signals if ``--signal``
asks for them; Kubernetes and most clouds' agents send SIGTERM; Grid Engine and LSF send SIGUSR1 and SIGUSR2.
``farcall launch`` passes all of them on to its workers. A program need not know which: it asks
``preempted()`` between two steps, saves its state, and exits with ``REQUEUE_STATUS``.

For process 1 of a PID namespace, the kernel discards each signal that has no handler. A pod whose program is
process 1 would run on after SIGTERM until its grace period is over and it is killed; so that gets a handler.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final

from rpc.errors import RpcError

__all__ = ["REQUEUE_STATUS", "SIGNALS", "Watch", "end_at_sigterm", "on_preempted", "preempted"]

logger = logging.getLogger(__name__)

REQUEUE_STATUS: Final = os.EX_TEMPFAIL
"""Exit status (75) of a process that has saved its state and wants to be run again. ``farcall launch`` ends
the job with it, without a restart.
"""

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that announce a preemption."""


class Watch:
    """Records signals that announce a preemption, from its creation until it is closed.

    A handler that the program has set before is called as well; a signal that is ignored stays so. For the
    main thread.

    Args:
        signals: the signals to record.
        callback: called, without arguments, in the signal handler of the first one.

    Raises:
        RpcError: this is not the main thread.
    """

    def __init__(
        self, signals: Iterable[signal.Signals] = SIGNALS, callback: Callable[[], object] | None = None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RpcError("signals can be watched from the main thread only: ask there first")
        self.preempted = False
        self._callback = callback
        self._before: dict[signal.Signals, Any] = {}
        for number in signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.preempted = not self.preempted, True
        if first and self._callback is not None:
            self._callback()
        before = self._before[signal.Signals(number)]
        if callable(before) and before is not _end:
            before(number, frame)

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


_watch: Watch | None = None
_callbacks: Final[list[Callable[[], object]]] = []


def preempted() -> bool:
    """Return whether the engine has announced that it takes this job's machines away.

    The first call starts watching for the signals SIGTERM, SIGUSR1, SIGUSR2 and SIGXCPU, which no longer end
    the process then. Make it on the main thread, at the program's start. Each process finds out by itself,
    perhaps at another step than its peers: if all must stop at the same step, let one decide, or reduce the
    answer over all ranks.

    Raises:
        RpcError: the first call is not on the main thread.

    Example::

        farcall.preempted()
        for step in range(first, last):
            train(step)
            if farcall.preempted():
                save(step)
                sys.exit(farcall.REQUEUE_STATUS)
    """
    return _watching().preempted


def on_preempted(callback: Callable[[], object]) -> ExitStack:
    """Have ``callback()`` called once the engine has announced that it takes this job's machines away; at
    once if it has already. Starts watching, as ``preempted`` does.

    Args:
        callback: called on a thread of its own. Its exceptions are logged.

    Returns:
        A context manager that ends the registration, on ``close()`` or at the end of a ``with`` statement.

    Raises:
        RpcError: the first call is not on the main thread.
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable, not {callback!r}")

    def called() -> None:  # a separate object, so that one callback may be registered twice
        callback()

    def end() -> None:
        if called in _callbacks:
            _callbacks.remove(called)

    _callbacks.append(called)
    if _watching().preempted:
        _call_soon()
    subscription = ExitStack()
    subscription.callback(end)
    return subscription


def _watching() -> Watch:
    global _watch
    if _watch is None:
        _watch = Watch(callback=_call_soon)
    return _watch


def _call_soon() -> None:
    start_new_thread(_call, ())  # in a signal handler: the main thread may hold a lock of ``threading``


def _call() -> None:
    while _callbacks:
        try:
            callback = _callbacks.pop(0)
        except IndexError:  # another thread has taken it
            return
        try:
            callback()
        except Exception:
            logger.exception("a callback of on_preempted has failed")


def end_at_sigterm() -> None:
    """If this is process 1 and SIGTERM has no handler, set one that ends this process, as in any other
    process.
    """
    if (
        os.getpid() == 1
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
