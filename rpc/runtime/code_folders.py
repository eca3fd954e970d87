"""The folders of this distribution's code, of the standard library, and of installed packages."""

from __future__ import annotations

import functools
import os
import sysconfig
from typing import Final

from farcall_guard import PACKAGES

__all__ = ["INSTALLED", "LIBRARIES", "OURS", "is_users"]

_HOME: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OURS: Final = tuple(os.path.join(_HOME, package, "") for package in (*PACKAGES, "farcall"))
"""Folders of this distribution's code."""

_STANDARD: Final = tuple(
    os.path.join(folder, "")
    for folder in {sysconfig.get_path("stdlib"), os.path.dirname(os.path.abspath(os.__file__))}
)
INSTALLED: Final = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
"""Folders of installed packages."""

LIBRARIES: Final = (*OURS, *_STANDARD, *INSTALLED)
"""Folders of code that is not the program's own."""


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether code of this file is the user's: not of this distribution, and not of the standard library."""
    if file.startswith(INSTALLED):
        return not file.startswith(OURS)
    return not file.startswith((*OURS, *_STANDARD, "<frozen "))
