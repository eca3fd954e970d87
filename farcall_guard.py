"""Are the packages that an import finds farcall's own?

farcall installs packages with short names. A program's own ``rpc.py`` hides ours, or ours hides it, and the
error that follows ("cannot import name ...") names neither. So each package looks its companions up before
it imports them. In a program that was written for PyTorch's names, and so did not ask for these, they are
ours whatever comes first on ``sys.path``: see ``prefer``. This module has a name of its own that hardly any
other has, and imports none of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

__all__ = [
    "PACKAGES",
    "HiddenPackageError",
    "check",
    "explain",
    "find_below_farcall",
    "hides_farcall",
    "installed",
    "namesakes",
    "prefer",
    "run",
]

PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd")
"""The packages that farcall consists of, besides ``farcall`` itself."""

_HOME: Final = Path(__file__).resolve().parent


class HiddenPackageError(ImportError):
    """Another module has the name of one of farcall's packages and is found first.

    Attributes:
        name: the package's name.
        path: where the other module is.
    """


def installed(*names: str) -> tuple[str, ...]:
    """Those of these packages that are part of this installation."""
    return tuple(name for name in names if (_HOME / name).is_dir())


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


def prefer() -> dict[str, Path]:
    """Have every import of our packages' names from now on find ours, wherever ``sys.path`` leads.

    Returns:
        The modules that would have been found instead, by name; nothing when it is called again.

    Raises:
        HiddenPackageError: another module was imported under one of these names.
    """
    if _preference in sys.meta_path:
        return {}
    sys.meta_path.insert(0, _preference)
    check(*PACKAGES)
    return namesakes()


def run(function: str, *args: Any) -> None:
    """In a new process: call a function of our packages, given by its qualified name, with ``prefer``. The
    garbage collector is off, since it would only visit what is imported.
    """
    gc.disable()
    prefer()
    module, _, name = function.rpartition(".")
    getattr(import_module(module), name)(*args)


class _Preference(MetaPathFinder):
    """Finds our packages before anything else is asked."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(_HOME)]) if fullname in PACKAGES else None


_preference: Final = _Preference()


def find_below_farcall() -> None:
    """Make ``import farcall.rpc`` import the package ``rpc``, and so on for the others and their modules.

    Both names refer to one module object, which is imported once.
    """
    if _second_names not in sys.meta_path:
        sys.meta_path.insert(0, _second_names)


class _SecondNames(MetaPathFinder, Loader):
    """Finds farcall's packages, and the modules in them, under names that begin with ``farcall.``."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        above, _, name = fullname.partition(".")
        package = name.partition(".")[0]
        if above != "farcall" or package not in PACKAGES:
            return None
        check(*PACKAGES)
        found = find_spec(name)
        if found is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        is_package = found.submodule_search_locations is not None
        return spec_from_loader(fullname, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that has the shorter name in place of the new, empty one."""
        name = module.__name__
        sys.modules[name] = import_module(name.partition(".")[2])


_second_names: Final = _SecondNames()


def explain(hidden: Mapping[str, Path]) -> str:
    """A line for a program in which our packages hide other modules, as ``namesakes`` finds them."""
    paths = " and ".join(map(str, hidden.values()))
    imports = " and ".join(f"`import {name}`" for name in hidden)
    if len(hidden) > 1:
        return (
            f"{paths} have the names of packages of farcall's: {imports} in this program get farcall's. If "
            "the program means its own, rename them."
        )
    return (
        f"{paths} has the name of one of farcall's packages: {imports} in this program gets farcall's. If "
        "the program means its own, rename it."
    )


def namesakes(folder: str | None = None) -> dict[str, Path]:
    """Modules that farcall's packages hide from a program.

    Args:
        folder: where to look; default: on ``sys.path``, what comes first there.

    Returns:
        Their paths, by name.
    """
    where = None if folder is None else [folder]
    found = {name: _location(PathFinder.find_spec(name, where)) for name in PACKAGES}
    return {name: path for name, path in found.items() if path is not None and path != _HOME / name}


def hides_farcall(folder: str) -> Path | None:
    """Return the module named ``farcall`` that Python finds if this folder comes first on ``sys.path``; None
    if there is no such module in it, or it is ours. "" is the working directory.
    """
    spec = PathFinder.find_spec("farcall", [folder])
    found = None if spec is None or spec.origin is None else _location(spec)  # a folder of data hides nothing
    return None if found == _HOME / "farcall" else found


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
