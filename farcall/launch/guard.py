"""Ends the workers of a launcher that was killed (``kill -9``, out of memory) and could not end them itself.

A process of its own, which imports nothing of farcall. It reads from its standard input which process groups
exist (``+PID`` and ``-PID``, a line each). The end of that input says that the launcher is gone: no other
process has the other end of the pipe, so it does not matter which thread of the launcher ended, which process
adopted the workers, or what they have forked. Then each worker gets SIGTERM, and time to end. Workers that do
not end, and the rest of their process groups, are killed.

::

    python -I guard.py SECONDS
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_LOOK_SECONDS = 0.05


def main() -> None:
    """Wait for the launcher's end, then end its workers."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)  # a scheduler sends its signals to all processes of a job
    grace, groups = float(sys.argv[1]), set[int]()
    for line in sys.stdin.buffer:
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    until = time.monotonic() + grace
    while groups:
        for group in [group for group in groups if time.monotonic() >= until or not _lives(group)]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            groups.remove(group)
        time.sleep(_LOOK_SECONDS)


def _lives(process: int) -> bool:
    """Whether a process has not ended. A zombie has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.exists("/proc/self"):
            return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
