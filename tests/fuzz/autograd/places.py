"""On which device the tensors of programs are: the CPU, or, in workers that ``settle``, one of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.device_groups import one_to_one
from tests.support.devices import COUNT, KIND, use_device
from tests.support.workers import Worker

__all__ = ["device", "devices", "recorded", "settle", "synchronize"]

_device = "cpu"


def device() -> str:
    """The device of this process's tensors."""
    return _device


def devices() -> list[Any]:
    """The devices of futures that a program makes."""
    return [] if _device == "cpu" else [torch.device(_device)]


def synchronize() -> None:
    """Wait for what a program made on other streams, and keeps beside calls and references."""
    if _device != "cpu":
        torch.accelerator.synchronize(torch.device(_device))


def recorded(value: Any) -> Any:
    """A value that a program may have made on another stream; if it is a tensor, its memory is kept until the
    current stream has used it, as a program must for what it keeps beside calls and references.
    """
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        value.record_stream(torch.accelerator.current_stream(value.device))
    return value


def settle(worker: Worker, mode: str | None) -> dict[str, Any]:
    """Have this process's tensors on a device from now on, the same in all workers, if a mode is given in
    which its streams run. Returns further options of the worker's group.
    """
    global _device
    if mode is None:
        return {}
    use_device(mode, worker.rank + 1)
    _device = f"{KIND}:{1 % COUNT}"
    return one_to_one(worker)
