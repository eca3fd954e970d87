"""Makes a ``FarcallProcessGroup`` from c10d's description of a new group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rpc.errors import InvalidOptionError
from rpc.options import AgentOptions
from spmd.collectives import torch_internals
from spmd.collectives.arguments import seconds_of
from spmd.collectives.group import Group
from spmd.collectives.handles import Workers
from spmd.collectives.node import find_node
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.collectives.reconfiguring import ReconfigurableProcessGroup
from spmd.collectives.vendors import VendorProcessGroup, Vendors

__all__ = ["check_not_refused", "create", "refuse"]

_refusal: Callable[[], Exception] | None = None


def refuse(error: Callable[[], Exception] | None) -> None:
    """Form no process groups in this process from now on, and raise this error instead; None: form them
    again.
    """
    global _refusal
    _refusal = error


def check_not_refused() -> None:
    """Raise the error that was given to ``refuse``, if any."""
    if _refusal is not None:
        raise _refusal()


def create(options: Any, agent_options: Any) -> FarcallProcessGroup:
    """Form a process group; all its ranks call this.

    Args:
        options: c10d's ``_DistributedBackendOptions``.
        agent_options: ``AgentOptions`` of an agent that is started for it, or ``Vendors``; None for the
            defaults, or for the vendors' backends that the default process group has.

    Raises:
        InvalidOptionError: ``pg_options`` are not ``AgentOptions``.
        TypeError, ValueError: the timeout is not a ``timedelta``, or negative.
        CollectiveTimeoutError, RendezvousTimeoutError: a rank has not come in time.
    """
    check_not_refused()
    vendors: Vendors | None = None
    if isinstance(agent_options, Vendors):
        vendors, agent_options = agent_options, None
    if agent_options is not None and not isinstance(agent_options, AgentOptions):
        raise InvalidOptionError(
            f"backend 'farcall' takes rpc.AgentOptions for pg_options, not {type(agent_options).__name__}"
        )
    size, rank = options.group_size, options.group_rank
    timeout = seconds_of(options.timeout, f"forming process group '{options.group_id}' at rank {rank}")
    torch_internals.prepare()
    if getattr(options, "enable_reconfigure", False):
        if vendors is not None:
            raise InvalidOptionError("enable_reconfigure is for backend 'farcall' alone, without vendors'")
        workers = Workers(options.store, rank, timeout, agent_options)
        return ReconfigurableProcessGroup(workers, options.group_id, rank, size, timeout, options.store)
    ranks = list(options.global_ranks_in_group) or list(range(size))
    world = _world() if agent_options is None else None
    node = None if world is None else world.group.node
    if isinstance(world, VendorProcessGroup):
        vendors = world.vendors
    if node is None:
        node = find_node(options.store, rank, size, timeout, agent_options)
        ranks = list(range(size))
    try:
        group = Group(node, ranks, rank, options.group_id, timeout)
        if vendors is not None and vendors.backends:
            return VendorProcessGroup(group, options.store, vendors)
        return FarcallProcessGroup(group, options.store)
    except BaseException:
        node.close_if_unused()  # so that the others need not wait for this rank
        raise


def _world() -> FarcallProcessGroup | None:
    """Return the default process group, if it is of this backend."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    return world if isinstance(world, FarcallProcessGroup) else None
