"""A command in a process of its own, whose output a test waits for, line by line."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["Command"]


class Command:
    """A command that runs, and what it has printed so far.

    Args:
        command: the command line.
        folder: the folder in which it runs.
        environment: all of its environment.
        seconds: maximum time without a new line, and until its end.
        own_session: whether it leads a session of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        seconds: float,
        *,
        own_session: bool = False,
    ) -> None:
        self.lines: list[str] = []
        self._seconds = seconds
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=own_session,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._new.put(line.rstrip("\n"))
        self._new.put(None)

    @property
    def said(self) -> str:
        """All that it has printed so far."""
        return "\n".join(self.lines)

    def wait_for(self, text: str, times: int = 1) -> str:
        """Wait until it has printed a number of lines that contain a text; returns the last of these."""
        for line in self.lines:
            times -= text in line
            if times == 0:
                return line
        while (new := self._next()) is not None:
            times -= text in new
            if times == 0:
                return new
        pytest.fail(f"it has ended without saying {text!r}:\n{self.said}")

    def _next(self) -> str | None:
        try:
            line = self._new.get(timeout=self._seconds)
        except queue.Empty:
            pytest.fail(f"it says nothing more:\n{self.said}")
        if line is not None:
            self.lines.append(line)
        return line

    def end(self) -> int:
        """Wait for its end; returns its exit status, as ``subprocess`` has it."""
        while self._next() is not None:
            pass
        return self.process.wait(self._seconds)
