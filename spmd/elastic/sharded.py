"""Parts of tensors that are sharded over a replica, and the state dictionaries that contain them.

A worker gives only its own parts to the worker at its place in another replica, whose meshes are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spmd.elastic.errors import ElasticError

__all__ = ["fully_sharded_parts", "is_fully_sharded", "local_part", "parts_of", "sharded_like", "with_parts"]


class _Part(NamedTuple):
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
        parts = {key: parts_of(value) for key, value in saved.items()}
        return parts if any(parts[key] is not value for key, value in saved.items()) else saved
    if type(saved) in (list, tuple):
        return type(saved)(map(parts_of, saved))
    return saved


def with_parts(target: Any, given: Any) -> Any:
    """Return what ``parts_of`` returned for another worker's object, with tensors that are sharded like those
    of ``target``.

    Raises:
        ElasticError: ``target`` has no such tensor.
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
    return _whole_in(target.state_dict(), given) if _has_parts(given) else given


def _whole(own: Any, value: Any) -> Any:
    return sharded_like(own, value.local) if isinstance(value, _Part) else value


def _has_parts(given: Any) -> bool:
    if isinstance(given, Mapping):
        given = given.values()
    elif type(given) not in (list, tuple):
        return isinstance(given, _Part)
    return any(map(_has_parts, given))


def _whole_in(own: Any, given: Any) -> Any:
    """Return part of a state dictionary with whole tensors; ``own`` is what the loading object has there."""
    if isinstance(given, _Part):
        if not isinstance(own, DTensor):
            raise ElasticError(
                f"the elastic job's state has a sharded tensor, whose part here has the shape "
                f"{tuple(given.local.shape)}, where this worker's has none: make it before elastic.join"
            )
        return sharded_like(own, given.local)
    if not _has_parts(given):
        return given
    if isinstance(given, Mapping):
        owns = own if isinstance(own, Mapping) else {}
        return {key: _whole_in(owns.get(key), value) for key, value in given.items()}
    owns = dict(enumerate(own)) if isinstance(own, list | tuple) else {}
    return type(given)(_whole_in(owns.get(place), value) for place, value in enumerate(given))
