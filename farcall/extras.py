"""How to install the packages that an optional part of farcall needs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata

__all__ = ["install_command", "missing"]


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra for this interpreter.

    It names the packages, not farcall with its extra, and so works wherever farcall was installed from.

    Example::

        install_command("page")  # "/home/ann/farcall/.venv/bin/python -m pip install 'aiohttp>=3.13'"
    """
    return shlex.join([sys.executable, "-m", "pip", "install", *dict.fromkeys(_packages(extra))])


def missing(what: str, extra: str, error: ImportError) -> str:
    """Return what an error says of a part that cannot be imported: what it needs, and the command."""
    needed = error.name.partition(".")[0] if error.name else "packages"
    return f"{what} needs {needed}, of farcall's extra {extra!r}: {install_command(extra)}"


def _packages(extra: str) -> Iterator[str]:
    for requirement in metadata.requires("farcall") or ():
        package, _, marker = map(str.strip, requirement.partition(";"))
        if not re.fullmatch(rf"extra == (['\"]){extra}\1", marker):
            continue
        if nested := re.fullmatch(r"farcall\[(.*)\]", package):
            for each in nested[1].split(","):
                yield from _packages(each)
        else:
            yield package
