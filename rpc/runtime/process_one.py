"""SIGTERM in process 1 of a container.

For process 1 of a PID namespace, the kernel discards each signal that has no handler. A pod whose program is
process 1 would run on until its grace period is over and it is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["end_at_sigterm", "ends_process"]


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


def ends_process(handler: object) -> bool:
    """Whether a signal's handler is the one that ``end_at_sigterm`` sets."""
    return handler is _end


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
