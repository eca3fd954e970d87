"""Entry points that installed distributions declare; reading them takes longer than the rest of a start."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import metadata

__all__ = ["entry_points"]


def entry_points(group: str) -> metadata.EntryPoints:
    """Return a group's entry points in all distributions that ``sys.path`` reaches. They are read once."""
    return _read(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _read(group: str, _path: tuple[str, ...]) -> metadata.EntryPoints:
    return metadata.entry_points(group=group)
