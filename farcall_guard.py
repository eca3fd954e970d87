"""Are the packages that an import finds farcall's own?

farcall installs packages with short names. A program's own ``rpc.py`` hides ours, or ours hides it, and the
error that follows ("cannot import name ...") names neither. So each package looks its companions up before
it imports them. This module has a name of its own that hardly any other has, and imports none of them.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["PACKAGES", "HiddenPackageError", "check", "namesakes"]

PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd")
"""The packages that farcall consists of, besides ``farcall`` itself."""

_HOME: Final = Path(__file__).resolve().parent


class HiddenPackageError(ImportError):
    """Another module has the name of one of farcall's packages and is found first.

    Attributes:
        name: the package's name.
        path: where the other module is.
    """


def check(*names: str) -> None:
    """Make sure that each of these packages is what an import of its name finds, or has found.

    Raises:
        HiddenPackageError: another module has that name; the message says where it is and what to do.
    """
    for name in names:
        found, ours = _location(_spec(name)), _HOME / name
        if found == ours:
            continue
        if found is None:
            raise HiddenPackageError(
                f"farcall's package '{name}' is not where it should be, at {ours}: reinstall farcall",
                name=name,
            )
        reason = (
            f"It was imported before farcall, as '{name}'."
            if name in sys.modules
            else f"Its folder comes before farcall's own ({_HOME}) on sys.path."
        )
        raise HiddenPackageError(
            f"farcall needs its package '{name}', but `import {name}` means another module here: {found}. "
            f"{reason} Rename that file, or move it where it is imported under another name.",
            name=name,
            path=str(found),
        )


def namesakes(folder: str) -> dict[str, Path]:
    """Modules in ``folder`` that farcall's packages will hide from a program.

    Args:
        folder: a folder that is to come first on ``sys.path``.

    Returns:
        Their paths, by name.
    """
    found = {name: _location(PathFinder.find_spec(name, [folder])) for name in PACKAGES}
    return {name: path for name, path in found.items() if path is not None and path != _HOME / name}


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ValueError:  # a module without a spec, put into sys.modules by hand
        module = sys.modules[name]
        return ModuleSpec(name, None, origin=getattr(module, "__file__", None) or repr(module))


def _location(spec: ModuleSpec | None) -> Path | None:
    """The file of a module, or the folder of a package."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
