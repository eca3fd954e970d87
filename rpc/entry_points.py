"""Entry points that installed distributions declare; reading them takes longer than the rest of a start."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib import metadata

__all__ = ["entry_points"]


def entry_points(group: str) -> metadata.EntryPoints:
    """Return a group's entry points in all distributions that ``sys.path`` reaches.

    They are read once, and again after an installation.
    """
    return _read(group, tuple((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=16)
def _read(group: str, _path: tuple[tuple[str, int], ...]) -> metadata.EntryPoints:
    return metadata.entry_points(group=group)
