"""Where the tensors of a message go: device maps at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rpc.devices.ipc import Export
from rpc.devices.staging import HostStaging, copied, on_device
from rpc.serialization.memory import memory_at
from rpc.serialization.placement import unmapped
from rpc.serialization.tensors import placed

__all__ = ["Placed"]


class Placed:
    """See ``Placement``: of tensors in calls, or in answers, to one worker.

    Args:
        receiver: the name of the worker.
        devices: for each local device the receiver's.
        remedy: for errors: what to write, given a device.
        staging: makes the staging of a message.
        in_place: whether the receiver reads a tensor of bytes in the sender's memory.
    """

    def __init__(
        self,
        receiver: str,
        devices: Mapping[torch.device, torch.device],
        remedy: Callable[[torch.device], str],
        staging: Callable[..., HostStaging],
        in_place: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self._receiver = receiver
        self._devices = dict(devices)
        self._remedy = remedy
        self.staging = staging
        self._in_place = in_place
        cpu = torch.device("cpu")
        self.takes_cpu = self._devices.get(cpu, cpu) != cpu

    def target(self, device: torch.device) -> torch.device | None:
        """The receiver's device for tensors on ``device``; None for a CPU tensor that stays one."""
        target = self._devices.get(device)
        if target is None:
            if device.type == "cpu":
                return None
            raise unmapped(device, self._remedy(device))
        return None if target.type == device.type == "cpu" else target

    def reduce(
        self,
        elements: Tensor,
        layout: tuple[str, tuple[int, ...], tuple[int, ...]],
        requires_grad: bool,
        departing: Any,
    ) -> tuple[Any, ...]:
        """Reduce a strided tensor; see ``Placement``."""
        target = self.target(elements.device)
        assert target is not None
        staged: HostStaging | None = departing.staging
        memory = elements.view(torch.uint8)
        data: Any
        beside = staged is not None and not staged.alone
        if beside and target.type != "cpu" and not elements.is_cpu and self._in_place(memory):
            return copied, (str(target), *layout, Export(memory), requires_grad)
        if departing.trial:
            data = b""
        elif staged is not None and not elements.is_cpu:
            data = staged.add(memory)
        else:
            host = memory.cpu()
            data = memory_at(host.data_ptr(), host.numel(), host)
        if target.type == "cpu":
            return placed, (*layout, data, requires_grad)
        return on_device, (str(target), *layout, data, requires_grad)
