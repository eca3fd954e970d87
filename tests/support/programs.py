"""A user's program, run as a user runs it: in a process of its own, from a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import leftovers

__all__ = ["run_program"]

_ROOT = Path(__file__).resolve().parent.parent.parent


def run_program(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Write a program and run it with Python to its end, which leaves nothing behind.

    Args:
        folder: where it runs, as ``program.py``.
        text: the program; "" if what runs is there already.
        arguments: of Python; ``program.py`` is one of them.
    """
    if text:
        (folder / "program.py").write_text(text)
    with leftovers.nothing_left():
        return subprocess.run(
            [sys.executable, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(_ROOT), "TMPDIR": str(folder)},
        )
