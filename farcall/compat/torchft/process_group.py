"""``torchft.process_group``: names of process groups; the elastic job's own group does the work.

``ManagedProcessGroup`` sums over the participants of a ``Manager``, for FSDP2's all-reduce across replicas.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farcall.compat.torchft.manager import Manager

__all__ = ["ManagedProcessGroup", "ProcessGroup", "ProcessGroupGloo", "ProcessGroupNCCL"]


class ProcessGroup:
    """Names a kind of group for a ``Manager``, which uses that of the backend farcall.

    Args:
        timeout: has no effect: a loss ends what is in progress at once.
        pg: has no effect.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: object = None) -> None:
        self.timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Have no effect."""
        self.timeout = timeout

    def abort(self) -> None:
        """Have no effect: the manager ends what is in progress."""

    def shutdown(self) -> None:
        """Have no effect: ``Manager.shutdown`` leaves the group."""


class ProcessGroupGloo(ProcessGroup):
    """A group for tensors on the CPU."""


class ProcessGroupNCCL(ProcessGroup):
    """A group for tensors on CUDA devices, which are staged through the host."""


class ManagedProcessGroup(dist.ProcessGroup):
    """The participants of a manager, as a process group that has ``allreduce`` only.

    Args:
        manager: the manager.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._manager = manager

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Sum or average one tensor over the participants; as ``Manager.allreduce``."""
        (tensor,) = tensors
        operation = opts if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType) else None
        if operation is None:
            operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._manager.allreduce(tensor, reduce_op=operation)

    def getRank(self) -> int:  # noqa: N802
        return self._manager.participating_rank() or 0

    def getSize(self) -> int:  # noqa: N802
        return self._manager.num_participants()

    def getBackendName(self) -> str:  # noqa: N802
        return "farcall"
