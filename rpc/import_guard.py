"""Are the packages that ``import rpc`` brings along farcall's own?

A program's own ``dist_autograd.py`` hides ours, and the error that follows would name neither.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["check_companions"]

_HOME = Path(__file__).resolve().parent.parent


def check_companions(*names: str) -> None:
    """Make sure that an import of each name finds what stands beside this package.

    Raises:
        ImportError: it finds another module; the message says where that is and what to do.
    """
    for name in names:
        try:
            spec = find_spec(name)
            origin = None if spec is None else spec.origin
        except ValueError:  # a module without a spec, put into sys.modules by hand
            origin = getattr(sys.modules[name], "__file__", None)
        if origin is None or Path(origin).resolve().parent != _HOME / name:
            raise ImportError(
                f"farcall needs its package '{name}', which stands in {_HOME}, but `import {name}` finds "
                f"{origin or 'a folder of that name'} in its place: rename that, or start Python elsewhere",
                name=name,
                path=origin,
            )
