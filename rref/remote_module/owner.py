"""Functions that the users of a remote module call on its owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rpc.runtime.current import current_agent
from rpc.runtime.torch_internals import pytree
from rref.reference import RRef

__all__ = ["call_on_device", "check_device", "make_module", "parameter_references", "set_training"]

T = TypeVar("T")


def make_module(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    interface: type | None,
) -> nn.Module:
    """Create the module on a device of this worker, in TorchScript if an interface is given."""
    check_device(device)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(_indexed(device))
    if interface is None or isinstance(module, torch.jit.ScriptModule):
        return module
    scripted: nn.Module = torch.jit.script(module)
    return scripted


def check_device(device: str) -> None:
    """Raise ``RuntimeError`` if this worker does not have a device; the message lists those that it has."""
    wanted = torch.device(device)
    if wanted.type in ("cpu", "meta"):
        return
    mine = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if mine is not None and mine.type == wanted.type else 0
    if (wanted.index or 0) >= count:
        worker, kind = current_agent().info.name, wanted.type.upper()
        raise RuntimeError(
            f"{kind} error: invalid device ordinal: worker '{worker}' has no {wanted}, since it sees "
            f"{count} {kind} devices. Place the module on '{worker}/cpu' or on a worker that has one."
        )


def _indexed(device: str) -> torch.device:
    """Return a device of this worker with its index, 0 unless it is given: the current device is that of the
    first tensor in a request.
    """
    found = torch.device(device)
    return found if found.type in ("cpu", "meta") else torch.device(found.type, found.index or 0)


def call_on_device(
    module: RRef[nn.Module],
    device: str,
    answers_from_device: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module that is not on the CPU, after moving tensors among the arguments to its device.

    Args:
        module: reference to the module, which this worker owns.
        device: device of the module.
        answers_from_device: whether tensors in the answer may stay there; otherwise they are moved to the
        CPU.
        args: positional arguments of ``forward``.
        kwargs: keyword arguments of ``forward``.
    """
    callable_here = module.local_value()
    args, kwargs = _moved((args, kwargs), _indexed(device))
    answer = callable_here(*args, **kwargs)
    return answer if answers_from_device else _moved(answer, "cpu")


def _moved(tree: T, device: torch.device | str) -> T:
    """Move all tensors in nested tuples, lists and dicts to a device."""
    moved: T = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
    return moved


def parameter_references(module: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    """Return a reference to each parameter of a module that this worker owns."""
    return [RRef(parameter) for parameter in module.local_value().parameters(recurse)]


def set_training(module: RRef[nn.Module], mode: bool) -> None:
    """Set a module that this worker owns to training or evaluation mode."""
    module.local_value().train(mode)
