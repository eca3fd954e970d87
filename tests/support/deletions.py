"""Changes the source in a copy of the tree, so that a check can show that something notices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Deletion", "copied", "copied_without", "report", "run"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_COPIED: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall", "tests")
_FILES: Final = ("pyproject.toml", "farcall_backend.py", "farcall_guard.py")


@dataclass(frozen=True)
class Deletion:
    """One line to delete.

    Attributes:
        what: what the line does.
        file, line: where it is, and its text without indentation.
        instead: the text in its place.
        tests: how the check selects the tests that must notice.
        which: of several equal lines, the one to delete, from 1 on; 0 for all.
    """

    what: str
    file: str
    line: str
    instead: str = "pass"
    tests: str = ""
    which: int = 0


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of the tree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in _COPIED:
            shutil.copytree(_ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
        for each in _FILES:
            shutil.copy(_ROOT / each, folder / each)
        yield folder


@contextmanager
def copied_without(deletion: Deletion) -> Iterator[Path]:
    """A temporary copy of the tree without the line."""
    with copied() as folder:
        path = folder / deletion.file
        lines = path.read_text().split("\n")
        found = [number for number, line in enumerate(lines) if line.strip() == deletion.line]
        if not found:
            raise SystemExit(f"{deletion.file} has no line {deletion.line!r}")
        for number in found if not deletion.which else [found[deletion.which - 1]]:
            line = lines[number]
            lines[number] = line[: len(line) - len(line.lstrip())] + deletion.instead
        path.write_text("\n".join(lines))
        yield folder


def run(folder: Path, *arguments: str, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy of the tree, with the packages of that copy."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def report(
    deletions: Sequence[Deletion], noticed_by: Callable[[Deletion, Path], str], only: int | None
) -> int:
    """Print what notices each deletion; returns 1 if nothing notices one.

    Args:
        noticed_by: returns what fails in a copy of the tree without the line; empty if nothing does.
        only: the number of the one deletion to look at, from 1 on; None for all.
    """
    unnoticed = 0
    for number, deletion in enumerate(deletions, 1):
        if only in (None, number):
            with copied_without(deletion) as folder:
                found = noticed_by(deletion, folder)
            unnoticed += not found
            print(f"{number:2} {deletion.what}: {found or 'NOTICED BY NO TEST'}", flush=True)
    return 1 if unnoticed else 0
