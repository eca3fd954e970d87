"""A launcher as a user runs it: ``farcall launch`` in a process of its own, which a test sends signals."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import leftovers

__all__ = ["Launcher", "Launchers", "launchers"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_SECONDS = 80.0


class Launcher:
    """One launcher, and what it has printed so far."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(_ROOT), "TMPDIR": str(folder)} | environment,
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
        """Waits until it prints a line that has a text; returns that line, the last of so many."""
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
            line = self._new.get(timeout=_SECONDS)
        except queue.Empty:
            pytest.fail(f"it says nothing more:\n{self.said}")
        if line is not None:
            self.lines.append(line)
        return line

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to it, and to nothing else."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Waits for its end; returns its exit status, as ``subprocess`` has it."""
        while self._next() is not None:
            pass
        return self.process.wait(_SECONDS)


class Launchers:
    """Starts launchers in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Launcher] = []

    def __call__(
        self, program: str, options: str, *, within: Sequence[str] = (), **environment: str
    ) -> Launcher:
        """Starts one.

        Args:
            program: text of the program.
            options: of ``farcall launch``.
            within: a command that runs it, such as ``unshare --pid --fork``.
            environment: variables beside the test's own.
        """
        (self._folder / "program.py").write_text(program)
        command = [*within, sys.executable, "-m", "farcall", "launch", *options.split(), "program.py"]
        launcher = Launcher(command, self._folder, environment)
        self._started.append(launcher)
        return launcher

    def close(self) -> None:
        """Kills what still runs."""
        for launcher in self._started:
            if launcher.process.poll() is None:
                launcher.process.kill()
                launcher.process.wait()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Starts launchers; they, their workers and all that these start must have ended with the test."""
    with leftovers.nothing_left():
        made = Launchers(tmp_path)
        try:
            yield made
        finally:
            made.close()
