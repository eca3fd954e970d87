"""Workers as ranks of a c10d process group, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import rpc
import spmd  # noqa: F401  # registers the backend
from tests.support import default_device
from tests.support.workers import Worker

__all__ = ["by_messages", "process_group"]


def by_messages() -> rpc.AgentOptions:
    """Options of ranks that are to behave as if each were on a host of its own."""
    return rpc.AgentOptions(shared_memory_bytes=0)


@contextmanager
def process_group(
    worker: Worker,
    *,
    seconds: float = 20.0,
    options: rpc.AgentOptions | None = None,
    backend: str = "farcall",
) -> Iterator[Any]:
    """The default process group, of all workers of the run."""
    dist.init_process_group(
        default_device.backend(backend),
        init_method=f"{worker.init_method}-c10d",
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=seconds),
        pg_options=options,
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
