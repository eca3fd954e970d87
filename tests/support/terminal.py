"""A command in a terminal of its own, of a given width, as somebody sits before it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.support.interpreters import take_terminal

__all__ = ["Terminal"]

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command that runs in a pseudo-terminal; a context manager, which kills it at the end.

    Args:
        command: with its arguments.
        columns: how wide the terminal is.
        env: its environment.

    Attributes:
        printed: what it has printed so far, control characters included.
    """

    def __init__(self, command: Sequence[str], columns: int, env: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        sizes = {"COLUMNS": "", "LINES": "", "TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, **sizes},
            start_new_session=True,
            preexec_fn=take_terminal,  # noqa: PLW1509 - one system call
        )
        os.close(theirs)
        self.printed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)

    def read_until(self, pattern: str, seconds: float) -> bool:
        """Read on until something matches, or nothing is printed any more; returns whether it did."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self.printed):
            if not select.select([self._ours], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"no {pattern!r} for {seconds:g} s in: {self.printed[-2000:]}")
            try:
                self.printed += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # nobody has it open any more
                return False
        return True

    def type(self, text: str) -> None:
        """As from its keyboard: the character 3 is Ctrl-C."""
        os.write(self._ours, text.encode())

    def end(self, seconds: float) -> int:
        """Read what is printed until the end; returns the exit status."""
        self.read_until(r"(?!)", seconds)
        return self._process.wait(seconds)

    @property
    def lines(self) -> list[str]:
        """What it has printed, line by line, as it was drawn: without colours and movements."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", _CONTROL.sub("", self.printed))]
