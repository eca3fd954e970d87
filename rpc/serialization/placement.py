"""Placement of device tensors for workers without an agreement about devices: an error."""

from __future__ import annotations

from typing import Any, Final

import torch

from rpc.errors import SerializationError
from rpc.serialization.payload import Placement, Staging

__all__ = ["UNMAPPED_ANSWERS", "UNMAPPED_CALLS", "of_answers", "of_calls", "unmapped"]


def unmapped(device: torch.device, remedy: str) -> SerializationError:
    """Return the error for a tensor on a device that no device map has; ``remedy`` says what to write."""
    return SerializationError(
        f"it is on device {device}: the TensorPipe RPC backend only supports CPU tensors by default, and no "
        f"device map says which device of the receiver stands for {device}. {remedy}. Or move it to the CPU "
        "before sending it (tensor.cpu()), and back on the other side"
    )


class _Unmapped:
    """See ``Placement``: it has no devices.

    Args:
        remedy: what to write, with a placeholder for the device.
    """

    takes_cpu = False

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def target(self, device: torch.device) -> torch.device | None:
        """None for the CPU; raises for any other device."""
        if device.type == "cpu":
            return None
        raise unmapped(device, self._remedy.format(device=device))

    def reduce(self, elements: object, layout: object, requires_grad: bool, departing: object) -> Any:
        """Never called, since ``target`` raises."""
        raise NotImplementedError

    def staging(self, *, alone: bool = False) -> Staging | None:
        """None: there is nothing to copy."""
        return None


UNMAPPED_CALLS: Final[Placement] = _Unmapped(
    "Request device mapping is not available for this worker: call `set_device_map` on "
    "`TensorPipeRpcBackendOptions`, for example options.set_device_map(worker, "
    "{{'{device}': '{device}'}}), or pass it device_maps="
)

UNMAPPED_ANSWERS: Final[Placement] = _Unmapped(
    "Response device mapping is not available for this worker: answers go by the reverse of the caller's "
    "device map, so have the caller call `set_device_map` on `TensorPipeRpcBackendOptions`, for example "
    "options.set_device_map(callee, {{'{device}': '{device}'}}), or pass it device_maps="
)


def of_calls(to: object) -> Placement:
    """Return the placement of tensors in calls to a worker."""
    devices = getattr(to, "devices", None)
    return UNMAPPED_CALLS if devices is None else devices.calls


def of_answers(to: object) -> Placement:
    """Return the placement of tensors in answers to a worker."""
    devices = getattr(to, "devices", None)
    return UNMAPPED_ANSWERS if devices is None else devices.answers
