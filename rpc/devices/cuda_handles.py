"""CUDA memory for another process, by the handles that ``torch.multiprocessing`` uses."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rpc.errors import SerializationError
from rpc.runtime.torch_internals import release_ipc_counter

__all__ = ["CudaHandles", "checked"]

_COUNTER: Final = re.compile(rb"/torch_[0-9_]+")
"""Name of a file of counters; see ``at::NewProcessWideShmHandle``."""

_COUNTERS: Final = 10_000
"""Number of counters in a file."""


def checked(handle: Any) -> list[Any]:
    """Check what can be checked of a handle of another process, of which the driver checks little.

    Raises:
        SerializationError: it is no handle, names no counter, or elements outside its memory.
    """
    match handle:
        case [int(numel), int(offset), bytes(), int(size), int(), bytes(counter), int(number), bytes(), _]:
            pass
        case _:
            raise SerializationError("a malformed handle of CUDA memory")
    if not _COUNTER.fullmatch(counter) or not 0 <= number < _COUNTERS:
        raise SerializationError("a handle of CUDA memory that names no counter")
    if numel < 0 or offset < 0 or offset + numel > size:
        raise SerializationError("a handle of CUDA memory that names elements outside it")
    found: list[Any] = list(handle)
    return found


class CudaHandles:
    """See ``Handles``. PyTorch counts the processes that have the memory. A thread that frees an opened
    tensor waits for the current stream.
    """

    def identity(self, index: int) -> str:
        """The device's UUID."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def export(self, elements: Tensor) -> list[Any]:
        """Name a tensor; PyTorch records an event on the current stream."""
        with torch.cuda.device(elements.device):
            reduced: Any = reductions.reduce_tensor(elements)  # type: ignore[no-untyped-call]  # untyped in torch
        _, _, _, offset, _, _, _, handle, size, storage_offset, _, *counter_and_event = reduced[1]
        return [elements.numel(), offset, handle, size, storage_offset, *counter_and_event]

    def open(self, handle: Any, index: int) -> Tensor:
        """The tensor; the current stream waits for the event."""
        numel, offset, memory, size, storage_offset, *counter_and_event = checked(handle)
        with torch.cuda.device(index):
            opened: Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]  # untyped in torch
                Tensor,
                (numel,),
                (1,),
                offset,
                torch.storage.TypedStorage,
                torch.uint8,
                index,
                memory,
                size,
                storage_offset,
                False,
                *counter_and_event,
            )
        return opened

    def release(self, handle: Any) -> None:
        """Count down for a process that does not open it."""
        counter, offset = checked(handle)[5:7]
        release_ipc_counter(counter, offset, device=torch.cuda.current_device())
