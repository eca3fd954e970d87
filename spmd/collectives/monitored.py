"""A barrier that names the ranks that have not come."""

from __future__ import annotations

from typing import Final

import torch

from spmd.collectives.algorithms import Algorithms
from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError
from spmd.collectives.group import Group
from spmd.collectives.signature import signature

__all__ = ["monitored_barrier"]

_PATIENCE: Final = 2.0
"""Time in seconds by which the others wait longer than rank 0, so that rank 0 is the one that names missing
ranks.
"""


def monitored_barrier(group: Group, seconds: float, wait_all_ranks: bool) -> None:
    """Wait at rank 0 until all ranks have come, and then release all.

    Args:
        group: process group, all of whose ranks call this.
        seconds: maximum time in seconds that rank 0 waits; 0 for no limit.
        wait_all_ranks: whether the error's first words name all missing ranks that are known, not only the
            first.

    Raises:
        CollectiveError: not all ranks have come. It begins with the words of gloo's error, for programs that
            search for them.
    """
    rank, size = group.members.rank, group.members.size

    def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
        nothing = torch.empty(0, device="cpu")
        algorithms.gather(field, deadline, [nothing] * size if rank == 0 else None, nothing, 0)
        algorithms.broadcast(field, deadline, nothing, 0)

    limit = seconds if rank == 0 else seconds * _PATIENCE
    try:
        group.run(signature("monitored_barrier"), [], perform, blocks=True, timeout=limit).wait()
    except CollectiveError as error:
        missing = error.ranks if isinstance(error, CollectiveTimeoutError) else ()
        if rank:
            words = (
                f"Rank {rank} successfully reached monitoredBarrier, "
                "but received errors while waiting for send/recv from rank 0"
            )
        elif len(missing) > 1 and wait_all_ranks:
            words = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier"
        elif missing:
            words = f"Rank {missing[0]} failed to pass monitoredBarrier"
        else:
            raise
        raise type(error)(f"{words}: {error}") from error
