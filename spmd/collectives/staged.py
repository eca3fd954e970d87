"""Collectives on tensors of an accelerator, which are staged through pinned memory of the host.

As with NCCL, an operation runs after the work that is on the caller's current streams when it is called. It
runs on streams of its own: inputs are copied to the host there, and results to the device. A thread that
waits for the operation makes its current streams wait for the latter copies; the thread itself waits until
they are enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rpc.devices.streams import Ready, Streams

__all__ = ["Staged"]


class Staged:
    """The streams of one operation. Made on the calling thread, then used on any thread.

    Args:
        tensors: all that the operation reads or writes; at least one is on an accelerator.

    Attributes:
        devices: the accelerator's devices among them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        on_devices = [tensor for tensor in tensors if not tensor.is_cpu]
        self.devices: list[torch.device] = list(dict.fromkeys(tensor.device for tensor in on_devices))
        self._called = Ready(on_devices, self.devices)
        self._written: Ready | None = None

    def run(self, perform: Callable[[], object]) -> None:
        """Perform the operation, or its last part, on streams of its own."""
        with Streams(self.devices):
            self._called.join()
            perform()
            self._written = Ready(self._called.tensors, self.devices)

    def join(self) -> None:
        """Make the current streams wait for the results of the operation, which has ended."""
        if self._written is not None:
            self._written.join()
