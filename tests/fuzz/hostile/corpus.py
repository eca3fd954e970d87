"""Inputs that have reached something, or have broken something once: a text file for each target, one to a
line.

``tests/fuzz/corpus/frames.txt`` has those of the target ``frames``, in base64; lines that begin with ``#``
say what the next one has broken. The quick test runs them all.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Final

__all__ = ["add_failure", "load"]

_FOLDER: Final = Path(__file__).parent.parent / "corpus"


def load(target: str) -> list[bytes]:
    """All inputs of a target."""
    path = _FOLDER / f"{target}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [b64decode(line) for line in lines if line and not line.startswith("#")]


def add_failure(target: str, data: bytes, what: str) -> None:
    """Add an input that has broken something, and what."""
    _FOLDER.mkdir(exist_ok=True)
    if data not in load(target):
        with (_FOLDER / f"{target}.txt").open("a") as file:
            file.write(f"# {' '.join(what.split())[:100]}\n{b64encode(data).decode()}\n")
