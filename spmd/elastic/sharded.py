"""Parts of tensors that are sharded over a replica, and the state dictionaries that contain them.

A worker gives only its own parts to the worker at its place in another replica, whose meshes are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["fully_sharded_parts", "is_fully_sharded", "local_part", "parts_of", "sharded_like", "with_parts"]


@dataclass(frozen=True, slots=True)
class _Part:
    """Takes the place of a sharded tensor."""

    local: torch.Tensor


def fully_sharded_parts(module: nn.Module) -> list[nn.Module]:
    """Return those of a module and its parts that ``fully_shard`` has been applied to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has been applied to a module or a part of it."""
    return bool(fully_sharded_parts(module))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like another one, and has ``part`` as this worker's part."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def parts_of(saved: Any) -> Any:
    """Return a state dictionary with this worker's parts in place of sharded tensors."""
    if isinstance(saved, DTensor):
        return _Part(saved.to_local())
    if isinstance(saved, Mapping):
        return {key: parts_of(value) for key, value in saved.items()}
    return saved


def with_parts(target: Any, given: Any) -> Any:
    """Return what ``parts_of`` returned for another worker's module or optimizer, with tensors that are
    sharded like those of ``target``.
    """
    if isinstance(target, nn.Module):
        own = target.state_dict()
        return {key: _whole(own.get(key), value) for key, value in given.items()}
    if isinstance(target, torch.optim.Optimizer):
        groups = zip(target.param_groups, given["param_groups"], strict=False)
        owns = {
            key: own
            for mine, other in groups
            for own, key in zip(mine["params"], other["params"], strict=False)
        }
        state = {
            key: {name: _whole(owns.get(key), value) for name, value in values.items()}
            for key, values in given["state"].items()
        }
        return {**given, "state": state}
    return given


def _whole(own: Any, value: Any) -> Any:
    return sharded_like(own, value.local) if isinstance(value, _Part) else value
