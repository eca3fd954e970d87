"""Objects that mean something in one process only: its shard of a tensor, its place in a mesh, its groups.

A copy of one would mean something else at its receiver, such as this rank's shard where the receiver's
belongs. So they are refused, with what to send in place of them. The result of a collective that is still
under way is sent once it is there, as the tensor that it is then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from rpc.errors import SerializationError
from rpc.runtime.torch_internals import ASYNC_COLLECTIVE_TENSOR, SHARDED_TENSOR

__all__ = ["FLATTENED", "reducer_of"]

Reducer = Callable[[Any, Any], Any]

FLATTENED: Final = (
    "a process has one shard of a parameter of FullyShardedDataParallel, and a receiver would take the "
    "sender's for its own: inside FullyShardedDataParallel.summon_full_params(module), which all ranks must "
    "call, send parameter.detach().clone()"
)
"""The reason why parameters that FSDP1 has sharded are refused; they are of the usual type."""


def _refuse(reason: str) -> Reducer:
    def refuse(*_: object) -> Any:
        raise SerializationError(reason)

    return refuse


def _reduce_result(tensor: Any, pickler: Any) -> Any:
    """Wait for a collective, and reduce its result, which has the same gradient history."""
    result: Tensor = tensor.clone() if tensor.requires_grad else tensor.trigger_wait()
    return pickler.reducers[type(result)](result, pickler)


_REDUCERS: Final[dict[str, Reducer]] = {
    "torch.distributed.tensor:DTensor": _refuse(
        "a process has one shard of a DTensor, and a receiver would take the sender's for its own: send "
        "tensor.full_tensor(), which all ranks of its mesh must call, or tensor.to_local()"
    ),
    SHARDED_TENSOR: _refuse(
        "a process has some shards of a ShardedTensor, and a receiver would take the sender's for its own: "
        "send the tensor that tensor.gather() fills, or tensor.local_tensor()"
    ),
    ASYNC_COLLECTIVE_TENSOR: _reduce_result,
    "torch.distributed.device_mesh:DeviceMesh": _refuse(
        "a DeviceMesh has the rank and the coordinates of its own process: send its shape and the names of "
        "its dimensions, and call init_device_mesh on each rank"
    ),
    "torch.distributed:ProcessGroup": _refuse(
        "a process group consists of connections of its own process: send its ranks "
        "(torch.distributed.get_process_group_ranks), and call torch.distributed.new_group on each of them"
    ),
    "torch.distributed:Work": _refuse(
        "a collective is under way in its own process: send the tensors that it fills, after work.wait()"
    ),
}
"""Reducers of these types, by module and name: modules that nobody has imported are not imported here."""


def reducer_of(kind: type) -> Reducer | None:
    """Return the reducer of a type whose objects mean something in one process only; None for other types."""
    for name, reduce in _REDUCERS.items():
        module, _, attribute = name.partition(":")
        if kind is getattr(sys.modules.get(module), attribute, None):
            return reduce
    return None
