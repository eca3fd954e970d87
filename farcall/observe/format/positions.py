"""Positions in programs: function, file and line."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a program."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @classmethod
    def of(cls, value: object, folder: str = "") -> Position | None:
        """Parse the position in a snapshot; its file is relative to the folder in which the worker runs."""
        match value:
            case [str(function), str(file), int(line)]:
                prefix = folder.rstrip("/") + "/"
                return cls(function, file.removeprefix(prefix) if folder else file, int(line))
        return None
