"""A store of weights: a model is published once, and read anywhere, in any sharding, always whole.

::

    from farcall import rpc, weights

    store = weights.Store("policy", on="trainer0", keep=3)  # any worker of the group opens it by name
    store.put(step, model.state_dict())  # each rank puts the shards that it has
    version = store.get(model.state_dict(), newer_than=version)  # into whatever sharding is there

``docs/weights.md`` has a page for users. The files, from the lowest:

- ``blocks``, ``layout``, ``assembly``, ``catalogue``: which block of a tensor a process has, how a version
lies
  in memory, the parts that make it up, and the versions of a store. Pure.
- ``memory``: segments, and their descriptors.
- ``keeper``: the process that keeps the versions; ``store``: the handles of the others.
- ``listening``: stores for programs without a group.
"""

from __future__ import annotations

from farcall.weights.blocks import Block
from farcall.weights.errors import WeightsError
from farcall.weights.listening import connect
from farcall.weights.store import Lease, Store

__all__ = ["Block", "Lease", "Store", "WeightsError", "connect"]
