"""From what c10d knows of a new group to a ``FarcallProcessGroup``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rpc.errors import InvalidOptionError
from rpc.options import AgentOptions
from spmd.collectives import torch_internals
from spmd.collectives.arguments import seconds_of
from spmd.collectives.group import Group
from spmd.collectives.node import Node, find_node
from spmd.collectives.process_group import FarcallProcessGroup

__all__ = ["create"]


def create(options: Any, agent_options: Any) -> FarcallProcessGroup:
    """Form a process group; all its ranks call this.

    Args:
        options: c10d's ``_DistributedBackendOptions``.
        agent_options: ``AgentOptions`` of an agent that is started for it; None for the defaults.

    Raises:
        InvalidOptionError: ``pg_options`` are no ``AgentOptions``.
        TypeError, ValueError: the timeout is no ``timedelta``, or less than 0.
        CollectiveTimeoutError, RendezvousTimeoutError: a rank has not come in time.
    """
    if agent_options is not None and not isinstance(agent_options, AgentOptions):
        raise InvalidOptionError(
            f"backend 'farcall' takes rpc.AgentOptions for pg_options, not {type(agent_options).__name__}"
        )
    size, rank = options.group_size, options.group_rank
    timeout = seconds_of(options.timeout, f"forming process group '{options.group_id}' at rank {rank}")
    torch_internals.prepare()
    ranks = list(options.global_ranks_in_group) or list(range(size))
    node = _world() if agent_options is None else None
    if node is None:
        node = find_node(options.store, rank, size, timeout, agent_options)
        ranks = list(range(size))
    try:
        return FarcallProcessGroup(Group(node, ranks, rank, options.group_id, timeout), options.store)
    except BaseException:
        node.close_if_unused()  # so that the others need not wait for this rank
        raise


def _world() -> Node | None:
    """The node of the default process group, if that is one of ours."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    return world.group.node if isinstance(world, FarcallProcessGroup) else None
