"""A store of weights: a model is published once, and read anywhere, in any sharding, always whole.

::

    from farcall import rpc, weights

    store = weights.Store("policy", on="trainer0", keep=3)  # any worker of the group opens it by name
    store.put(step, model.state_dict())  # each rank puts the shards that it has
    version = store.get(model.state_dict(), newer_than=version)  # into whatever sharding is there

``docs/weights.md`` has a page for users. The files, from the lowest:

- ``blocks``, ``layout``, ``assembly``, ``delta``: which block of a tensor a process has, how a
  version lies in memory, the parts that make it up, and what has changed between two. Pure.
- ``versions``, ``catalogue``, ``hosts``: the life of a version, the versions of a store, and the host from
  which each other host gets them. Pure.
- ``memory``: the shared memory of a store.
- ``node``: what an agent keeps, and how others ask it.
- ``keeper``: the process that keeps a store; ``transfer``, ``handle``: what readers and writers copy and ask.
- ``copies``: the processes that have a copy of a store; ``replication``, ``successors``: the second copy.
- ``store``, ``lease``: what users see.
- ``listening``: stores for programs without a group.
"""

from __future__ import annotations

from farcall.weights.blocks import Block
from farcall.weights.errors import WeightsError
from farcall.weights.lease import Lease
from farcall.weights.listening import connect
from farcall.weights.store import Store

__all__ = ["Block", "Lease", "Store", "WeightsError", "connect"]
