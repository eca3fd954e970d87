"""Errors for a wrong plan, mesh or input. The message has rank and module, what was expected and what was
given.

Each class also derives from the one that ``torch.distributed.tensor.parallel`` raises in the same place.
"""

from __future__ import annotations

from rpc.errors import RpcError, WorkerLostError

__all__ = [
    "LayoutCountError",
    "NotInMeshError",
    "ParallelError",
    "ParallelTypeError",
    "ShardLostError",
    "UnsupportedModuleError",
]


class ParallelError(RpcError, ValueError):
    """A plan, a mesh or an input is invalid for tensor parallelism."""


class ParallelTypeError(ParallelError, TypeError):
    """A plan, or an input of a parallelized module, has a wrong type."""


class UnsupportedModuleError(ParallelError, NotImplementedError):
    """A style was given to a module that it cannot parallelize."""


class LayoutCountError(ParallelError, AssertionError):
    """The number of layouts differs from the number of their inputs or outputs."""


class NotInMeshError(ParallelError):
    """This process is not in the mesh."""


class ShardLostError(WorkerLostError):
    """A shard of a model is gone, and with it the model.

    Attributes:
        rank: of the shard, in the model.
    """

    def __init__(self, message: str, worker: str = "", reason: str = "", rank: int = -1) -> None:
        super().__init__(message, worker, reason)
        self.rank = rank

    @classmethod
    def of(cls, rank: int, worker: str, reason: str) -> ShardLostError:
        """The error for a shard."""
        return cls(f"rank {rank} (worker '{worker}') of the model is gone: {reason}", worker, reason, rank)
