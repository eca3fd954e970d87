"""``torchft.data``: a sampler for replica groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as _DistributedSampler

__all__ = ["DistributedSampler"]


class DistributedSampler(_DistributedSampler[Any]):
    """Cuts a data set over replica groups, and over the workers of each.

    The parts are fixed: those of a lost replica group are not used while it is away. ``elastic.Sampler`` uses
    each sample.

    Args:
        dataset: the data set.
        replica_rank: number of this replica group.
        num_replica_groups: number of replica groups.
        group_rank: rank in the replica group; default: that of the default process group.
        num_replicas: number of workers of a replica group; default: that of the default process group.
        kwargs: arguments of PyTorch's ``DistributedSampler``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        group_rank = dist.get_rank() if group_rank is None else group_rank
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.global_rank = replica_rank * num_replicas + group_rank
        self.global_world_size = num_replica_groups * num_replicas
        super().__init__(dataset, rank=self.global_rank, num_replicas=self.global_world_size, **kwargs)
