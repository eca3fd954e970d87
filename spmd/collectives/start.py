"""``spmd.init_process_group`` and ``spmd.dump_flight_recorder``, for programs that use process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from rpc.errors import GroupMismatchError
from rpc.runtime.current import current_agent
from spmd.collectives.creation import check_not_refused
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.collectives.store import WorkerStore, fail_if_lost, forget_keys
from spmd.collectives.vendors import Vendors, agreed, vendors

__all__ = ["dump_flight_recorder", "init_process_group"]

_EXTENSION: Final = "spmd.stores"


def init_process_group(timeout: timedelta | None = None, *, staged: bool = False) -> None:
    """Make the workers of the RPC group PyTorch's default process group: worker i is rank i.

    All workers must call it. It needs no address, since workers meet over RPC. Tensors on an accelerator go
    to the backend that PyTorch has for it, such as ``cuda:nccl``; if one of the workers has none, they are
    staged through the host.

    Args:
        timeout: timeout of forming the group, and of each collective; default: c10d's, 30 minutes.
        staged: whether to stage tensors on an accelerator in any case, for example where several ranks share
            one GPU, which NCCL refuses.

    Raises:
        NotInitializedError: ``rpc.init_rpc`` has not been called.
        GroupMismatchError: the group is dynamic, so its ranks are not known.
        ValueError: there is a default process group.
        TypeError: ``timeout`` is not a ``timedelta``.
        RendezvousTimeoutError: not all workers have called it in time; names the missing ones.
        DistError: a worker is lost before the group is formed.

    Example::

        rpc.init_rpc("worker0", rank=0, world_size=4)
        spmd.init_process_group()
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...
        torch.distributed.destroy_process_group()
        rpc.shutdown()
    """
    agent: Any = current_agent()
    if not isinstance(timeout, timedelta | None):
        raise TypeError(
            f"rank {agent.get_worker_info().id}: expected a timedelta for timeout, got {timeout!r}"
        )
    if not agent.is_static_group:
        raise GroupMismatchError(
            "a process group needs ranks that stay, but workers join and leave this dynamic RPC group: "
            "give init_rpc a world_size"
        )
    check_not_refused()
    if dist.is_initialized():
        raise ValueError(f"rank {agent.get_worker_info().id} has a default process group already")
    me, workers = agent.get_worker_info(), agent.get_worker_infos()
    number = agent.extensions.get(_EXTENSION, (0, None))[0]
    store = WorkerStore(workers[0].name, f"{number}/")
    agent.extensions[_EXTENSION] = number + 1, store  # C++ does not keep it
    forget_keys(agent, f"{number - 2}/")  # all have left that world, since all have joined the next one
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    backend = "farcall"
    with fail_if_lost(store, [worker.name for worker in workers]):
        found = agreed(Vendors({}) if staged else vendors(), store, me.id, len(workers), timeout)
        if found.backends:
            backend = found.config
            options["pg_options"] = found
        dist.init_process_group(backend, store=store, rank=me.id, world_size=len(workers), **options)


def dump_flight_recorder(prefix: str) -> str:
    """Write this process's last collectives, sends and receives to a file, for PyTorch's ``torchfrtrace``.

    Each rank writes its own file; the tool reads all files of a folder. If the environment variable
    ``TORCH_FR_DUMP_TEMP_FILE`` gives the prefix, the files are also written when a group fails.

    Args:
        prefix: beginning of the file's name; the rank is appended.

    Returns:
        The file's name.

    Raises:
        ValueError: there is no default process group, or it is not of the backend ``farcall``.
        OSError: the file cannot be written.

    Example::

        spmd.dump_flight_recorder("/tmp/traces/rank_")  # then: torchfrtrace /tmp/traces
    """
    world = dist.group.WORLD
    if not isinstance(world, FarcallProcessGroup):
        raise ValueError("dump_flight_recorder needs a default process group of the backend 'farcall'")
    return world.group.node.recorder.dump(prefix, world.getRank())
