"""What of ``torch_xla.core.xla_model`` speaks to other replicas: in SPMD mode there is the one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_SUM",
    "_fetch_gradients",
    "_maybe_convert_to_cpu",
    "all_gather",
    "all_reduce",
    "collective_broadcast",
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
            torch._foreach_mul_(list(inputs), scale)
    return None


def all_gather(
    value: Tensor, dim: int = 0, groups: object = None, output: Tensor | None = None, pin_layout: bool = True
) -> Tensor:
    """What all replicas have: ``value``, and in ``output``, if there is one."""
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
