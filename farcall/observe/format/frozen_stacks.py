"""Stacks of a process whose interpreter lock is held, written by ``faulthandler``, in C, on a signal.

A reader that finds a process silent sends the signal, to the observing thread alone: a signal to the process
could go to any thread, and interrupt a system call in which the program waits. The file keeps what was
written after ``kill -9``. No timer of the process itself sends the signal: after ``SIGCONT``, or a long wait
for a core, it would expire while the interpreter runs, and ``faulthandler`` can crash a process whose other
threads run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FrozenStacks", "Stack", "read_stacks"]

FROZEN_SECONDS: Final = 3.0
"""Time without a look, in seconds, after which a process is asked for its stacks."""

_SIGNALS: Final = tuple(range(signal.SIGRTMAX - 3, signal.SIGRTMAX - 9, -1))
"""Signals to choose from: the first that the program does not use."""

_MAX_BYTES: Final = 4 << 20

_THREAD: Final = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*?)\])? .*:$")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class FrozenStacks:
    """Writes the stacks of this process to a file when its interpreter cannot. For one thread.

    Args:
        path: the file; an existing file is replaced.

    Attributes:
        signal: number of the signal that makes it write the stacks; 0: the program uses all candidates.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self.path = path
        self._file = os.open(path, flags, 0o600)
        self.signal = next((each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL), 0)
        if self.signal:
            faulthandler.register(self.signal, file=self._file, all_threads=True, chain=False)

    def clear(self) -> None:
        """Delete stacks that were written."""
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_size:
                os.ftruncate(self._file, 0)

    def move(self, path: Path) -> None:
        """Rename the file."""
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        """Write no more stacks; the file stays."""
        if self.signal:
            faulthandler.unregister(self.signal)
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread.

    Attributes:
        thread: identifier of the thread.
        frames: function, file and line of each frame, innermost first.
        name: name of the thread; "" if that is not known.
        holds_interpreter: whether it is known to hold the interpreter lock.
        native: the functions in C that it is in, innermost first, if they are known.
    """

    thread: int
    frames: tuple[tuple[str, str, int], ...]
    name: str = ""
    holds_interpreter: bool = False
    native: tuple[str, ...] = ()


def read_stacks(text: str) -> Mapping[int, Stack]:
    """Parse the output of ``faulthandler``; returns the last stack of each thread. Anything else is
    skipped.
    """
    found: dict[int, Stack] = {}
    thread: int | None = None
    frames: list[tuple[str, str, int]] = []

    def end() -> None:
        if thread is not None and frames:
            found[thread] = Stack(thread, tuple(frames))

    for line in text[-_MAX_BYTES:].splitlines():
        begin = _THREAD.match(line)
        if begin is not None:
            end()
            thread, frames = int(begin.group(1), 16), []
        elif (frame := _FRAME.match(line)) is not None and thread is not None:
            file, number, function = frame.groups()
            frames.append((function, file, int(number) if number.isdigit() else 0))
    end()
    return found
