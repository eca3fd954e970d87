"""The worker and device of a remote module, written ``"worker/device"``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

import torch

from rpc.errors import with_article
from rpc.group.membership import WorkerReference

__all__ = ["RemoteDevice"]

_RANK: Final = re.compile("rank:([0-9]+)")


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """A worker and one of its devices.

    Attributes:
        worker: the worker's name or rank.
        device: the device, as that worker names it.
    """

    worker: WorkerReference
    device: torch.device

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``"worker1/cpu"``, ``"rank:1/cuda:0"`` or, for the CPU, ``"worker1"``.

        Raises:
            TypeError: ``text`` is not a string.
            ValueError: ``text`` has another form, or names no worker.
            RuntimeError: PyTorch knows no such kind of device.

        Example::

            RemoteDevice.parse("rank:1/cuda:0") == RemoteDevice(1, torch.device("cuda:0"))
        """
        if not isinstance(text, str):
            raise TypeError(
                f"remote_device is a string such as 'worker1/cpu', not {with_article(type(text))}"
            )
        worker, slash, device = text.partition("/")
        if not worker or "/" in device:
            raise ValueError(
                f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
                "'rank:<rank>/<device>'; without a device it means the worker's CPU."
            )
        if not slash and _is_device(worker):
            raise ValueError(
                f"remote_device {text!r} names a device but no worker: write '<workername>/{text}' "
                f"(or '{text}/cpu' if a worker is called so)"
            )
        rank = _RANK.fullmatch(worker)
        try:
            return cls(int(rank[1]) if rank else worker, torch.device(device if slash else "cpu"))
        except RuntimeError as error:
            raise RuntimeError(
                f"remote_device {text!r}: {error}. It is '<workername>/<device>', such as 'worker1/cpu'"
            ) from None


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
