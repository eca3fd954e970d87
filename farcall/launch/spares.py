"""Spare processes of ``farcall launch --spares``: they have imported everything, and wait to become a worker.

Importing PyTorch takes seconds; with a spare, a failed worker is back without that time. A spare is a process
of ``worker_main`` that has not run any of the program. When a worker fails, the launcher sends the worker's
environment to a spare, which then runs the program, and starts another spare.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final

from farcall.launch.failures import signal_name
from farcall.launch.processes import Guard
from farcall.launch.spare_process import FLAG, READY
from farcall.launch.terminal import say
from rpc.runtime.interrupts import interrupts_blocked

__all__ = ["Spares"]

_PAUSE_SECONDS: Final = 2.0
"""Time until a spare is replaced, since its imports would compete with the workers that start."""

_PART_BYTES: Final = 1 << 16
"""Size in bytes of the end of a spare's output that is looked at."""


class Spares:
    """The spare processes of one launcher. For one thread.

    Args:
        count: number of spares.
        command: the command of a worker, to which the flag is added.
        place: index of the flag in the command.
        guard: ends spares if the launcher is killed.
    """

    def __init__(self, count: int, command: Sequence[str], place: int, guard: Guard) -> None:
        self._count, self._command, self._place, self._guard = count, list(command), place, guard
        self._spares: list[_Spare] = []
        self._due = time.monotonic() + _PAUSE_SECONDS

    def keep(self) -> None:
        """Start spares in place of those that were taken, or have ended. Call it often."""
        for each in [each for each in self._spares if each.has_ended()]:
            if not each.is_ready():
                self._count -= 1
                say(
                    f"a spare process ({each.process.pid}) {_end_of(each.process.returncode)} before it was "
                    f"ready; it is not replaced: {each.last_words()}"
                )
            self._drop(each)
        if len(self._spares) < self._count and time.monotonic() >= self._due:
            try:
                spare = _Spare(self._command, self._place)
            except OSError as error:
                self._count -= 1
                say(f"a spare process cannot be started, and is not tried again: {error}")
            else:
                self._spares.append(spare)
                self._guard.tell("+", spare.process.pid)

    def take(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Have a spare run the program in an environment, and return its process; None if there is none."""
        for each in sorted(self._spares, key=lambda spare: not spare.is_ready()):
            if not each.has_ended() and each.give(environment):
                self._spares.remove(each)
                self._due = time.monotonic() + _PAUSE_SECONDS
                return each.process
        return None

    def close(self) -> None:
        """End all spares."""
        self._count = 0
        for each in [*self._spares]:
            each.end()
            self._drop(each)

    def _drop(self, spare: _Spare) -> None:
        self._spares.remove(spare)
        self._guard.tell("-", spare.process.pid)
        spare.close()


class _Spare:
    """One spare process, as the launcher sees it."""

    def __init__(self, command: Sequence[str], place: int) -> None:
        self._socket, other = socket.socketpair()
        with contextlib.ExitStack() as if_it_fails, other:
            if_it_fails.enter_context(self._socket)
            flag = f"{FLAG}{other.fileno()}"
            with interrupts_blocked():
                self.process = subprocess.Popen(
                    [*command[:place], flag, *command[place:]],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(other.fileno(),),
                    start_new_session=True,
                )
            if_it_fails.pop_all()
        self._socket.setblocking(False)
        self._is_ready = False

    def is_ready(self) -> bool:
        """Whether it has imported everything."""
        with contextlib.suppress(OSError):
            self._is_ready = self._is_ready or self._socket.recv(1) == READY
        return self._is_ready

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def give(self, environment: Mapping[str, str]) -> bool:
        """Send it the environment of a worker; false if it is gone."""
        try:
            with self._socket:
                self._socket.setblocking(True)
                self._socket.sendall(json.dumps(dict(environment)).encode() + b"\n")
        except OSError:
            return False
        return True

    def last_words(self) -> str:
        """Return the last line of what a spare that has ended has printed."""
        assert self.process.stderr is not None
        number = self.process.stderr.fileno()
        os.set_blocking(number, False)  # a process that it has started may hold the other end
        printed = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(number, _PART_BYTES):
                printed = (printed + part)[-_PART_BYTES:]
        lines = printed.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it has printed nothing"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self._socket.close()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def _end_of(status: int) -> str:
    return f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
