"""Inputs that have reached something, or have broken something once: a text file for each target, one to a
line.

``tests/fuzz/corpus/frames.txt`` has those of the target ``frames``, in base64; lines that begin with ``#``
say what the next one has broken. The quick test runs them all.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "add_failure", "add_inputs", "load"]

FOLDER: Final = Path(__file__).parent.parent / "corpus"


def load(target: str, folder: Path = FOLDER) -> list[bytes]:
    """All inputs of a target."""
    path = folder / f"{target}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [b64decode(line) for line in lines if line and not line.startswith("#")]


def add_inputs(target: str, inputs: Iterable[bytes], folder: Path = FOLDER) -> int:
    """Add those that are new; how many."""
    folder.mkdir(exist_ok=True)
    new = sorted(set(inputs) - set(load(target, folder)), key=len)
    with (folder / f"{target}.txt").open("a") as file:
        file.writelines(b64encode(each).decode() + "\n" for each in new)
    return len(new)


def add_failure(target: str, data: bytes, what: str, folder: Path = FOLDER) -> None:
    """Add an input that has broken something, and what."""
    folder.mkdir(exist_ok=True)
    if data not in load(target, folder):
        with (folder / f"{target}.txt").open("a") as file:
            file.write(f"# {' '.join(what.split())[:100]}\n{b64encode(data).decode()}\n")
