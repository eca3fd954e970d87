"""Processes that compute beside what is measured, as other jobs on the machine do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

__all__ = ["busy_processes"]

_PROGRAM: Final = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


@contextlib.contextmanager
def busy_processes(count: int, limit: float) -> Iterator[None]:
    """Have processes of another session compute for the duration of a ``with`` statement.

    Args:
        count: their number.
        limit: time in seconds after which they end by themselves, should this process die.
    """
    command = (sys.executable, "-I", "-S", "-c", _PROGRAM.format(limit))
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command, start_new_session=True))
            stack.callback(process.kill)
        time.sleep(0.1)  # they have begun
        yield
