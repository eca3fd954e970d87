"""The private names of PyTorch that collectives need: their gate, as ``rpc/runtime/internals.py`` describes.

``prepare``, which the first process group calls, logs the ones that the installed version does not have.

*The flight recorder.* From 2.15 on, c10d attaches a hook to each new group, unless all of its backends are
listed as ones that record by themselves. The hook cannot be attached to a group that is written in Python: it
asks for the group's default backend, which is an object of C++. It would also see nothing, since it is called
by the dispatcher, which operations of such a group do not pass through. So the function that attaches it is
replaced by one that leaves our groups out, and ``flight_recorder.py`` records. Listing the backend would not
suffice if another one, a vendor's, serves a group's devices.

*The timeout of a group.* Up to 2.13, ``_set_pg_timeout`` knows gloo and NCCL only. It is replaced by a
function that calls ``set_timeout`` of our groups and leaves all others to the original.

*Groups that c10d does not count.* ``new_group`` names some groups by the number of groups that this process
has. ``form_uncounted`` forms one under a name that is given, and removes it from that number.

*Resharding.* On the CPU, DTensor gathers a whole tensor to move its shards from one dimension to another,
since gloo once had no all-to-all. It is replaced for meshes whose groups are of the backend ``farcall``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from rpc.runtime.internals import Internals
from rpc.runtime.torch_internals import is_profiler_enabled

__all__ = ["INTERNALS", "begin_event", "end_event", "form_uncounted", "is_profiled", "no_error", "prepare"]

INTERNALS: Final = Internals()
_find: Final = INTERNALS.find

_BACKEND: Final = "farcall"
_UNPROFILED: Final = "PyTorch's profiler does not show collectives"
_GATHERED: Final = "DTensor gathers a tensor whenever it moves its shards to another dimension"

_UNFORMED: Final = (
    "tensors on an accelerator cannot go to the backend of its vendor; pass staged=True to init_process_group"
)

_attach_recorder: Final[Callable[..., None] | None] = _find(
    "torch.distributed.distributed_c10d:_maybe_attach_flight_recorder",
    "process groups can be formed only if TORCH_FR_BUFFER_SIZE=0 is in the environment",
    instead=None,
    since=(2, 15),
)
_error_type: Final[Any] = _find(
    "torch._C._distributed_c10d:ErrorType", "get_error of process groups returns None", instead=None
)
_set_timeout: Final[Callable[..., object] | None] = _find(
    "torch.distributed.distributed_c10d:_set_pg_timeout",
    "_set_pg_timeout has no effect; call set_timeout of the group",
    instead=None,
    until=(2, 13),
)
_form: Final[Callable[..., Any]] = _find(
    "torch.distributed.distributed_c10d:_new_process_group_helper", _UNFORMED
)
_uncount: Final[Callable[[dist.ProcessGroup], object]] = _find(
    "torch.distributed.distributed_c10d:_cleanup_process_group_global_state", _UNFORMED
)
_reshard: Final = INTERNALS.later(
    "torch.distributed.tensor.placement_types:shard_dim_alltoall", _GATHERED, instead=None
)
_exchange: Final = INTERNALS.later("torch:ops._dtensor.shard_dim_alltoall", _GATHERED, instead=None)

INTERNALS.expect(
    "torch.distributed:ProcessGroup._set_group_desc", without="process groups have no descriptions"
)
INTERNALS.expect(
    "torch.distributed:ProcessGroup._get_backend",
    without="the backend of a group of a vendor's cannot be returned to callers that ask for it",
)
INTERNALS.expect(
    "torch.distributed:ProcessGroup._start_coalescing",
    "torch.distributed:ProcessGroup._end_coalescing",
    without="batches of sends and receives cannot be coalesced by a vendor's backend",
)

begin_event: Final[Callable[..., object]] = _find(
    "torch._C:_autograd._record_function_with_args_enter", _UNPROFILED, instead=None
)
"""Begin an event of the profiler: called with a name and tensors."""
end_event: Final[Callable[[object], None]] = _find(
    "torch._C:_autograd._record_function_with_args_exit", _UNPROFILED, instead=None
)
"""End an event, on the calling thread."""


def _is_never_profiled() -> bool:
    return False


is_profiled: Final = is_profiler_enabled if None not in (begin_event, end_event) else _is_never_profiled
"""Whether a profiler records this thread, and events can be recorded."""


def no_error() -> Any:
    """Return c10d's value for a group without an error."""
    return None if _error_type is None else _error_type.SUCCESS


@functools.cache
def prepare() -> None:
    """Look up all names and install the replacements. Called before the first group is formed."""
    reshard, exchange = _reshard(), _exchange()  # which imports DTensor
    INTERNALS.check()
    if _attach_recorder is not None:
        _replace_attach_recorder(_attach_recorder)
    if _set_timeout is not None:
        _replace_set_timeout(_set_timeout)
    if reshard is not None and exchange is not None:
        _replace_resharding(reshard, exchange)


def form_uncounted(
    name: str, backend: str, rank: int, ranks: Sequence[int], store: Store, timeout: timedelta
) -> dist.ProcessGroup:
    """Form a process group that c10d does not know: it is not counted, and not destroyed with the others.

    Args:
        name: its name, the same on all ranks, and of no other group of theirs.
        backend: in c10d's notation, such as ``cuda:nccl``.
        rank: rank of this process in the group.
        ranks: ranks of the group in the default group, in order; all, if that is not formed yet.
        store: store of the ranks.
        timeout: timeout of forming the group, and of each operation.
    """
    of_world = list(ranks) if dist.is_initialized() else []  # which c10d takes for the default group
    # With a tag of its own it is not found by its ranks, either.
    formed, _ = _form(len(ranks), rank, of_world, backend, store, name, timeout=timeout, pg_tag=name)
    _uncount(formed)
    group: dist.ProcessGroup = formed
    return group


def _replace_attach_recorder(original: Callable[..., None]) -> None:
    @functools.wraps(original)
    def maybe_attach_flight_recorder(pg: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        if not _is_ours(pg):
            original(pg, *args, **kwargs)

    module: Any = distributed_c10d
    module._maybe_attach_flight_recorder = maybe_attach_flight_recorder


def _replace_set_timeout(original: Callable[..., object]) -> None:
    @functools.wraps(original)
    def set_pg_timeout(timeout: Any, group: Any = None) -> None:
        which: Any = dist.group.WORLD if group is None else group
        if isinstance(which, dist.ProcessGroup) and _is_ours(which):
            which.set_timeout(timeout)
        else:
            original(timeout, group)

    distributed_c10d._set_pg_timeout = set_pg_timeout


def _is_ours(group: dist.ProcessGroup) -> bool:
    # A group of C++ has a name only once it has a backend; ours are of a class of their own.
    return type(group) is not dist.ProcessGroup and group.name() == _BACKEND


def _replace_resharding(original: Callable[..., torch.Tensor], exchange: Callable[..., torch.Tensor]) -> None:
    from torch.distributed.tensor import placement_types as module

    placement_types: Any = module

    @functools.wraps(original)
    def shard_dim_alltoall(
        local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
    ) -> torch.Tensor:
        group = mesh.get_group(mesh_dim)
        if mesh.device_type != "cpu" or dist.get_backend(group) != _BACKEND:
            return original(local, gather_dim, shard_dim, mesh, mesh_dim)
        return exchange(local, gather_dim, shard_dim, group.group_name)

    placement_types.shard_dim_alltoall = shard_dim_alltoall
