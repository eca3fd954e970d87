"""DTensor's resharding from one dimension to another by all-to-all, where PyTorch gathers everything.

On the CPU PyTorch takes for granted that there is no all-to-all, as gloo once had none. This replaces the one
function that says so, for meshes whose groups are of the backend ``farcall``; all others keep PyTorch's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["install"]


@functools.cache
def install() -> None:
    """Replace it, once in a process. Called when a group is made."""
    from torch.distributed.tensor import placement_types as module

    placement_types: Any = module
    original = placement_types.shard_dim_alltoall

    def shard_dim_alltoall(
        local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
    ) -> torch.Tensor:
        group = mesh.get_group(mesh_dim)
        if mesh.device_type != "cpu" or dist.get_backend(group) != "farcall":
            kept: torch.Tensor = original(local, gather_dim, shard_dim, mesh, mesh_dim)
            return kept
        exchanged: torch.Tensor = torch.ops._dtensor.shard_dim_alltoall(
            local, gather_dim, shard_dim, group.group_name
        )
        return exchanged

    placement_types.shard_dim_alltoall = shard_dim_alltoall
