"""farcall in programs of Ray: groups of workers that Ray places, and a transport for tensors between actors.

::

    import farcall.ray

    results = farcall.ray.run_group(main, workers=4)     # each worker is an actor of Ray

    farcall.ray.register_tensor_transport()              # before the actors are created
    @ray.method(tensor_transport="FARCALL")
    def make(self): ...

Needs Ray: the extra ``ray``.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from farcall.ray.group import run_group as run_group
    from farcall.ray.tensor_transport import register_tensor_transport as register_tensor_transport

__all__ = ["register_tensor_transport", "run_group"]

_MODULES = {"register_tensor_transport": "tensor_transport", "run_group": "group"}


def __getattr__(name: str) -> _Any:
    """Import a module when it is used.

    A thread of Ray's may import one while the program imports this package. If this package imported them
    itself, each thread would wait for the other, and Python would let one import fail.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'farcall.ray' has no attribute {name!r}")
    return getattr(_importlib.import_module(f"farcall.ray.{_MODULES[name]}"), name)
