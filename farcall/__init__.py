"""The front door of farcall: the command line, and ``compat`` for programs written for PyTorch's RPC.

The packages that do the work are top-level packages: ``rpc``, ``rref`` and so on. ``import farcall.rpc``,
``from farcall import rpc`` and ``import rpc`` give the same module. What imports them checks that those
names refer to farcall's packages.
"""

from __future__ import annotations

import importlib as _importlib
from importlib import metadata as _metadata
from typing import TYPE_CHECKING
from typing import Any as _Any

import farcall_guard as _guard

_guard.find_below_farcall()

if TYPE_CHECKING:
    import dist_autograd as dist_autograd
    import dist_optim as dist_optim
    import rpc as rpc
    import rref as rref
    import spmd as spmd
    from farcall.serving import serve as serve
    from rpc.runtime.preemption import REQUEUE_STATUS as REQUEUE_STATUS
    from rpc.runtime.preemption import on_preempted as on_preempted
    from rpc.runtime.preemption import preempted as preempted

__all__ = ["REQUEUE_STATUS", "__version__", "on_preempted", "preempted", "serve"]

_PREEMPTION = ("REQUEUE_STATUS", "on_preempted", "preempted")

try:
    __version__ = _metadata.version("farcall")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"


def __getattr__(name: str) -> _Any:
    """``from farcall import rpc``, and functions whose packages are imported when they are asked for."""
    if name in _guard.PACKAGES:
        _guard.check(*_guard.PACKAGES)
        return _importlib.import_module(name)
    if name in _PREEMPTION:
        _guard.check(*_guard.PACKAGES)
        return getattr(_importlib.import_module("rpc.runtime.preemption"), name)
    if name == "serve":
        return _importlib.import_module("farcall.serving").serve
    raise AttributeError(f"module 'farcall' has no attribute {name!r}")
