"""A launcher as a user runs it: ``farcall launch`` in a process of its own, which a test sends signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.commands import Command

__all__ = ["Launcher", "Launchers", "launchers"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_SECONDS = 80.0


class Launcher(Command):
    """One launcher, and what it has printed so far."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        seconds: float = _SECONDS,
    ) -> None:
        own = {"PYTHONPATH": str(_ROOT), "TMPDIR": str(folder)}
        super().__init__(command, folder, {**os.environ, **own, **environment}, seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it, and to nothing else."""
        self.process.send_signal(number)


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
