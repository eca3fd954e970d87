"""farcall in programs of Ray: groups of workers that Ray places, and a transport for tensors between actors.

::

    import farcall.ray

    results = farcall.ray.run_group(main, workers=4)     # each worker is an actor of Ray

    farcall.ray.register_tensor_transport()              # before the actors are created
    @ray.method(tensor_transport="FARCALL")
    def make(self): ...

Needs Ray: ``pip install 'farcall[ray]'``.
"""

from __future__ import annotations

import rpc  # noqa: F401  # whole, before parts of it: Ray's threads import this at the same time as the program's
from farcall.ray.group import run_group
from farcall.ray.tensor_transport import register_tensor_transport

__all__ = ["register_tensor_transport", "run_group"]
