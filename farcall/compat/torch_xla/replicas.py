"""Communication of ``torch_xla.core.xla_model`` with other replicas: in SPMD mode there is only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from rpc.runtime.torch_internals import pytree

__all__ = [
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_SUM",
    "_fetch_gradients",
    "_maybe_convert_to_cpu",
    "all_gather",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "collective_broadcast",
    "do_on_ordinals",
    "reduce_gradients",
    "reduce_scatter",
    "set_replication",
]

REDUCE_SUM: Final = "sum"
REDUCE_MIN: Final = "min"
REDUCE_MAX: Final = "max"


def set_replication(device: object, devices: Sequence[object]) -> None:
    """Nothing: there is one device."""


def all_reduce(
    reduce_type: str,
    inputs: Tensor | Sequence[Tensor],
    scale: float = 1.0,
    groups: object = None,
    cctx: object = None,
    pin_layout: bool = True,
) -> Tensor | None:
    """A new tensor, times ``scale``; several are scaled in place."""
    if isinstance(inputs, Tensor):
        return inputs.clone() if scale == 1.0 else inputs * scale
    if scale != 1.0:
        with torch.no_grad():
            for each in inputs:
                each.mul_(scale)
    return None


def all_gather(
    value: Tensor, dim: int = 0, groups: object = None, output: Tensor | None = None, pin_layout: bool = True
) -> Tensor:
    """Return the values of all replicas: ``value``, also in ``output``, if there is one."""
    return value if output is None else output.copy_(value)


def collective_broadcast(
    tensors: Sequence[Tensor], root_ordinal: int = 0, groups: object = None, pin_layout: bool = True
) -> None:
    """Nothing: the one replica has its tensors."""


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return [each.grad for each in parameters if each.grad is not None]


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    """The same with all tensors on the CPU."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), data) if convert else data


def reduce_scatter(
    reduce_type: str,
    input: Tensor,  # noqa: A002  theirs
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: object = None,
    output: Tensor | None = None,
    pin_layout: bool = True,
) -> Tensor:
    """The one replica's shard, which is all of ``input``, times ``scale``.

    Raises:
        ValueError: ``shard_count`` is the number of other replicas, too.
    """
    if shard_count != 1:
        raise ValueError(
            f"shard_count is {shard_count}: in SPMD mode there is one replica, use mark_sharding"
        )
    reduced = input * scale
    return reduced if output is None else output.copy_(reduced)


def all_to_all(
    value: Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: object = None,
    pin_layout: bool = True,
) -> Tensor:
    """What the one replica sends to itself.

    Raises:
        ValueError: ``split_count`` is that of other replicas, too.
    """
    if split_count != 1:
        raise ValueError(
            f"split_count is {split_count}: in SPMD mode there is one replica, use mark_sharding"
        )
    return value.clone()


def all_reduce_bucketized_gradients(
    gradients: Sequence[Tensor], scale: float, groups: object, pin_layout: bool, bucket_cap_mb: int = 0
) -> None:
    """Scale gradients in place."""
    all_reduce(REDUCE_SUM, gradients, scale)


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: object = None, pin_layout: bool = True
) -> None:
    """Nothing: gradients are those of the whole batch already."""


def broadcast_master_param(model: nn.Module) -> None:
    """Nothing: there is one replica of the model."""


def do_on_ordinals(
    target: Callable[..., object],
    data: Sequence[object] = (),
    ordinals: Sequence[int] = (0,),
) -> None:
    """Call a function if the one process, 0, is among these."""
    if 0 in ordinals:
        target(*_maybe_convert_to_cpu(tuple(data)))
