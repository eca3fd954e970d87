"""Memory and values for a module that was built on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd.tensor_parallel.errors import ParallelError

__all__ = ["materialize", "reset"]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers on the meta device memory for this rank's part, on another device. Ties are
    kept.
    """
    made: dict[int, Any] = {}

    def real(tensor: Any) -> Any:
        if tensor is None or not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            empty = _empty(tensor, device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for each in module.modules():
        each._parameters = {name: real(value) for name, value in each._parameters.items()}
        each._buffers = {name: real(value) for name, value in each._buffers.items()}


def reset(module: nn.Module) -> None:
    """Fill parameters and buffers as the modules that have them do.

    Raises:
        ParallelError: a module has some, and nothing that fills them.
    """
    unfilled = []
    for name, each in module.named_modules():
        own: Any = getattr(each, "reset_parameters", None) or getattr(each, "_reset_parameters", None)
        if own is not None:
            own()
        elif any(tensor is not None for tensor in (*each._parameters.values(), *each._buffers.values())):
            unfilled.append(f"'{name}' ({type(each).__name__})" if name else type(each).__name__)
    if unfilled:
        raise ParallelError(
            f"modules have parameters or buffers, but no reset_parameters that fills them: "
            f"{', '.join(unfilled)}. The model is built without memory, so what its constructors compute is "
            "lost: pass initialize"
        )


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor._local_tensor, device=device)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
