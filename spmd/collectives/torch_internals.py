"""PyTorch's private names, as far as collectives need them: the one file of this package that uses them.

Tried on torch 2.13, 2.14 and 2.15. ``prepare`` looks for all of them when the first process group is formed.
If a version of PyTorch lacks one, it says in the log what does not work; everything else does.

*The flight recorder.* From 2.15 on, c10d attaches a hook to each new group, unless the group's backend is
listed as one that records by itself. The hook cannot be attached to a group that is written in Python: it
asks for the group's default backend, which is an object of C++. It would also see nothing, since it is called
by the dispatcher, which operations of such a group do not pass through. So the backend is listed, and
``flight_recorder.py`` records.

*The timeout of a group.* Up to 2.13, ``_set_pg_timeout`` knows gloo and NCCL only. It is replaced by a
function that calls ``set_timeout`` of our groups and leaves all others to the original.

*Resharding.* On the CPU, DTensor gathers a whole tensor to move its shards from one dimension to another,
since gloo once had no all-to-all. It is replaced for meshes whose groups are of the backend ``farcall``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["INTERNALS", "Internal", "begin_event", "end_event", "inference_mode", "is_profiled", "prepare"]

logger = logging.getLogger(__name__)

_BACKEND: Final = "farcall"


@dataclass(frozen=True)
class Internal:
    """A private name of PyTorch.

    Attributes:
        place: the object that has it, as a dotted name.
        name: the attribute.
        without: what does not work if it is missing.
        since, until: the versions that need it, as (major, minor), both included; None for no limit.
    """

    place: str
    name: str
    without: str
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None

    @property
    def found(self) -> Any:
        """The object of that name; None if it is missing."""
        place: Any = torch
        for part in self.place.split(".")[1:]:
            place = getattr(place, part, None)
        return getattr(place, self.name, None)

    def is_needed(self, version: tuple[int, int]) -> bool:
        """Whether this version of PyTorch needs it."""
        return (self.since is None or version >= self.since) and (self.until is None or version <= self.until)


_SLOWER: Final = "collectives take a few microseconds longer"
_UNPROFILED: Final = "PyTorch's profiler does not show collectives"
_GATHERED: Final = "DTensor gathers a tensor whenever it moves its shards to another dimension"

_INFERENCE_MODE: Final = Internal("torch._C", "_InferenceMode", _SLOWER)
_PROFILED: Final = Internal("torch._C._autograd", "_profiler_enabled", _UNPROFILED)
_ENTER: Final = Internal("torch._C._autograd", "_record_function_with_args_enter", _UNPROFILED)
_EXIT: Final = Internal("torch._C._autograd", "_record_function_with_args_exit", _UNPROFILED)
_SELF_RECORDING: Final = Internal(
    "torch.distributed.distributed_c10d",
    "_FR_SELF_RECORDING_BACKENDS",
    "process groups can be formed only if TORCH_FR_BUFFER_SIZE=0 is in the environment",
    since=(2, 15),
)
_SET_TIMEOUT: Final = Internal(
    "torch.distributed.distributed_c10d",
    "_set_pg_timeout",
    "_set_pg_timeout has no effect; call set_timeout of the group",
    until=(2, 13),
)
_RESHARD: Final = Internal("torch.distributed.tensor.placement_types", "shard_dim_alltoall", _GATHERED)
_EXCHANGE: Final = Internal("torch.ops._dtensor", "shard_dim_alltoall", _GATHERED)

INTERNALS: Final = (
    _INFERENCE_MODE,
    _PROFILED,
    _ENTER,
    _EXIT,
    _SELF_RECORDING,
    _SET_TIMEOUT,
    _RESHARD,
    _EXCHANGE,
)
"""All private names that this package uses."""


@functools.cache
def prepare() -> None:
    """Look for the names and put the replacements in place. Called before the first group is formed."""
    import torch.distributed.tensor  # which defines some of them

    major, minor = torch.__version__.split(".")[:2]
    version = int(major), int(minor)
    missing = [each for each in INTERNALS if each.found is None and each.is_needed(version)]
    for without in dict.fromkeys(each.without for each in missing):
        names = ", ".join(f"{each.place}.{each.name}" for each in missing if each.without == without)
        logger.warning("PyTorch %s does not have %s: %s", torch.__version__, names, without)
    if _SELF_RECORDING.found is not None:
        _SELF_RECORDING.found.add(_BACKEND)
    if _SET_TIMEOUT.found is not None and _SET_TIMEOUT.is_needed(version):
        _replace_set_timeout(_SET_TIMEOUT.found)
    if _RESHARD.found is not None and _EXCHANGE.found is not None:
        _replace_resharding(_RESHARD.found)


def _replace_set_timeout(original: Callable[..., object]) -> None:
    @functools.wraps(original)
    def set_pg_timeout(timeout: Any, group: Any = None) -> None:
        which: Any = dist.group.WORLD if group is None else group
        if isinstance(which, dist.ProcessGroup) and which.name() == _BACKEND:
            which.set_timeout(timeout)
        else:
            original(timeout, group)

    distributed_c10d._set_pg_timeout = set_pg_timeout


def _replace_resharding(original: Callable[..., torch.Tensor]) -> None:
    from torch.distributed.tensor import placement_types as module

    placement_types: Any = module
    exchange: Any = _EXCHANGE.found

    @functools.wraps(original)
    def shard_dim_alltoall(
        local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
    ) -> torch.Tensor:
        group = mesh.get_group(mesh_dim)
        if mesh.device_type != "cpu" or dist.get_backend(group) != _BACKEND:
            return original(local, gather_dim, shard_dim, mesh, mesh_dim)
        exchanged: torch.Tensor = exchange(local, gather_dim, shard_dim, group.group_name)
        return exchanged

    placement_types.shard_dim_alltoall = shard_dim_alltoall


# ---- used by each collective

_has_profiler: Final = None not in (_PROFILED.found, _ENTER.found, _EXIT.found)

inference_mode: Final[Callable[[], AbstractContextManager[object]]] = (
    torch.inference_mode if _INFERENCE_MODE.found is None else functools.partial(_INFERENCE_MODE.found, True)
)
"""``torch.inference_mode()``, in a fraction of its time."""

if _has_profiler:
    is_profiled: Callable[[], bool] = _PROFILED.found
    begin_event: Callable[..., object] = _ENTER.found
    end_event: Callable[..., object] = _EXIT.found
else:

    def is_profiled() -> bool:
        """Whether a profiler records this thread."""
        return False

    def begin_event(name: str, *tensors: torch.Tensor) -> object:
        """Begin an event of the profiler."""

    def end_event(event: object) -> None:
        """End it, on the thread that it is called on."""
