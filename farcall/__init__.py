"""The front door of farcall: the command line, and ``compat`` for programs written for PyTorch's RPC.

The packages that do the work stand beside this one: ``rpc``, ``rref``. Importing this one checks that it is
ours that those names mean.
"""

from __future__ import annotations

from importlib import metadata as _metadata

import farcall_guard as _guard

__all__ = ["__version__"]

try:
    __version__ = _metadata.version("farcall")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"

_guard.check(*_guard.PACKAGES)
