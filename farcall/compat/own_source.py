"""Finds out whether a program itself imports ``torch_xla``, or only a library checks whether it could.

Libraries such as accelerate and transformers assume that a program runs on a TPU if ``torch_xla`` can be
imported in its process. So an import by a library is not enough: a module of the program must import it.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from importlib.machinery import PathFinder
from types import FrameType
from typing import Final

__all__ = ["imports_at_the_top", "installed_imports", "is_imported_by_the_program"]

_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib")
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
_IMPORT_SYSTEM: Final = "importlib"


def is_imported_by_the_program() -> bool:
    """Whether the import in progress, which has asked a finder of ours, is in the program's own source.

    That is source which is not installed, or belongs to the package that is run. ``importlib.util.find_spec``
    is no import.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "importlib.util" and frame.f_code.co_name == "find_spec":
            return False
        if not name.startswith((_IMPORT_SYSTEM, "_frozen_importlib", "farcall.compat")):
            return _is_own(frame)
        frame = frame.f_back
    return False


def _is_own(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if package in ("__main__", "__mp_main__") or (
        spec is not None and package == spec.name.partition(".")[0]
    ):
        return True
    file = frame.f_code.co_filename
    is_installed = any(each in file for each in _INSTALLED) or file.startswith(
        (_STANDARD_LIBRARY, "<frozen ")
    )
    return not is_installed


def imports_at_the_top(source: bytes, name: str) -> bool:
    """Whether a program imports a package in any case: at the top level, and under no condition.

    Args:
        source: the program's.
        name: of the package.
    """
    return name.encode() in source and any(each.partition(".")[0] == name for each in _imported(source))


def installed_imports(source: bytes, folder: str) -> list[str]:
    """Return the modules of installed packages that a program imports in any case.

    Args:
        source: the program's.
        folder: its folder, whose modules it imports first, under the same names.
    """
    return [each for each in _imported(source) if _is_installed(each.partition(".")[0], folder)]


def _imported(source: bytes) -> list[str]:
    try:
        lines = ast.parse(source).body
    except (SyntaxError, ValueError):  # to run it will say so
        return []
    return [
        *(alias.name for line in lines if isinstance(line, ast.Import) for alias in line.names),
        *(line.module or "" for line in lines if isinstance(line, ast.ImportFrom) and not line.level),
    ]


def _is_installed(package: str, folder: str) -> bool:
    if PathFinder.find_spec(package, [folder]) is not None:
        return False
    spec = PathFinder.find_spec(package)
    return spec is not None and any(each in (spec.origin or "") for each in _INSTALLED)
