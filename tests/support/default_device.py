"""Group tests once more with tensors on devices: ``FARCALL_TEST_ON_DEVICES=lazy pytest tests/group/rref``.

The variable names the mode in which the simulated accelerator runs its streams; ``FARCALL_TEST_SEED`` is the
seed of the delays in the mode ``random``; ``FARCALL_TEST_DEVICE`` may name another accelerator. In each
worker, on all threads, what creates tensors creates them on the first device where the program names none;
groups map devices one to one; and what a worker returns to the test is copied to the CPU. ``not_on_devices``
marks tests whose subject is the CPU's memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DEVICE",
    "MODE",
    "PRELOADED",
    "TYPE",
    "allow_reads_of_freed",
    "backend",
    "make_default",
    "not_on_devices",
    "placed",
    "put",
    "to_cpu",
    "use",
]

MODE: Final = os.environ.get("FARCALL_TEST_ON_DEVICES", "")
"""``"eager"``, ``"random"`` or ``"lazy"``; empty: tensors are on the CPU."""

TYPE: Final = os.environ.get("FARCALL_TEST_DEVICE", "sim") if MODE else "cpu"
"""The type of the default device."""

DEVICE: Final = f"{TYPE}:0" if MODE else "cpu"
"""The name of the default device."""

PRELOADED: Final = ("tests.support.devices", "torch._decomp.decompositions_for_jvp") if MODE else ()
"""What workers import for it, and what compiles the functions that are replaced here by TorchScript."""

_CREATING: Final = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
    *("randint", "randn", "randperm", "tensor", "zeros"),
)
"""Names in ``torch`` of the functions that create tensors on a default device."""

if MODE not in ("", "eager", "random", "lazy"):
    raise ValueError(f"FARCALL_TEST_ON_DEVICES is eager, random, lazy or nothing, not {MODE!r}")


def not_on_devices(reason: str) -> pytest.MarkDecorator:
    """Mark tests that have nothing to show with tensors on devices, and say why."""
    return pytest.mark.skipif(bool(MODE), reason=f"on devices: {reason}")


def backend(name: str) -> str:
    """The backends of a process group whose CPU tensors ``name`` has."""
    return f"cpu:{name},{TYPE}:farcall" if MODE else name


def make_default(rank: int) -> None:
    """Have this process, a worker of this rank, create its tensors on a device."""
    if not MODE:
        return
    import torch

    from tests.support.devices import use_device

    use_device(MODE, rank + 1)
    for name in _CREATING:
        setattr(torch, name, _on_device(getattr(torch, name), torch.device(DEVICE)))


def allow_reads_of_freed() -> None:
    """See ``tests.support.devices``; without devices, this does nothing."""
    if MODE:
        from tests.support import devices

        devices.allow_reads_of_freed()


def put(tensor: Tensor) -> Tensor:
    """The tensor on the default device, with its strides only if it has neither gaps nor overlaps."""
    return tensor.to(DEVICE)


def placed(worker: str) -> str:
    """Where a ``RemoteModule`` on a worker has its parameters; without a device it is the CPU."""
    return f"{worker}/{DEVICE}" if MODE else worker


def use(options: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Options of a group in which each device stands for the same one of the other workers."""
    if not MODE:
        return options
    from tests.support.devices import ONE_TO_ONE

    return {"device_maps": dict.fromkeys(names, ONE_TO_ONE)} | options


def to_cpu(value: Any) -> Any:
    """The value with its tensors on the CPU, for the test, whose process has no devices."""
    if not MODE:
        return value
    from torch import Tensor
    from torch.utils._pytree import tree_map

    return tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, value)


def _on_device(create: Callable[..., Any], device: Any) -> Callable[..., Any]:
    """A function that creates tensors, on ``device`` unless its arguments say otherwise."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None or kwargs.get("out") is not None:
            return create(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device != device:
            requires_grad = kwargs.pop("requires_grad", False)
            return create(*args, **kwargs).to(device).requires_grad_(requires_grad)
        return create(*args, **{**kwargs, "device": device})

    return created
