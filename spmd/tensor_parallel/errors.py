"""What can be wrong with a plan, a mesh or an input. A message names rank, module, what was expected and
given.

Each class also derives from what ``torch.distributed.tensor.parallel`` raises in the same place.
"""

from __future__ import annotations

from rpc.errors import RpcError

__all__ = [
    "LayoutCountError",
    "NotInMeshError",
    "ParallelError",
    "ParallelTypeError",
    "UnsupportedModuleError",
]


class ParallelError(RpcError, ValueError):
    """A plan, a mesh or an input is not what tensor parallelism needs."""


class ParallelTypeError(ParallelError, TypeError):
    """A plan, or an input of a parallelized module, has a type that it cannot have."""


class UnsupportedModuleError(ParallelError, NotImplementedError):
    """A style was given to a module that it cannot parallelize."""


class LayoutCountError(ParallelError, AssertionError):
    """Layouts and what they are for differ in number."""


class NotInMeshError(ParallelError):
    """This process is not one of the mesh's."""
