"""Copies of device tensors for messages: through pinned memory of the host, from device to device.

The pinned memory is that of PyTorch's caching host allocator, which keeps what is freed for the next message,
and does not reuse it before the copies that read or write it are done. Where memory cannot be pinned, copies
block the copying thread, with the same results.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rpc.devices.ipc import Import
from rpc.devices.streams import arrived, use_on_current_stream
from rpc.errors import NotInitializedError, SerializationError
from rpc.runtime.executor import Executor
from rpc.serialization.memory import layout_of

__all__ = ["HostStaging", "copied", "copy_bytes", "host_copy", "host_memory", "on_device"]

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 8 << 20
"""Size of the pieces in which larger tensors are copied to the device: filling and copying overlap."""

_TAKEN_BYTES: Final = 1 << 20
"""Size of the largest tensor, in bytes, that may be changed as soon as it was sent. It is first copied on the
device: the caller's stream never waits for a copy to the host."""

_current_stream = torch.accelerator.current_stream


class HostStaging:
    """See ``Staging``: copies of one message's tensors.

    Args:
        executor: its threads wait for the copies.
        alone: nothing can travel beside the message.
    """

    def __init__(self, executor: Executor, *, alone: bool = False) -> None:
        self.alone = alone
        self.is_wanted: Callable[[], bool] | None = None
        self._executor = executor
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[Any] = []
        self._events: list[torch.Event] = []

    def add(self, elements: Tensor) -> PickleBuffer:
        """The memory that a contiguous tensor of bytes will be copied to."""
        if elements.numel() <= _TAKEN_BYTES:
            use_on_current_stream(elements)
            elements = elements.clone()
        host = _pinned(elements.numel())
        array: Any = host.numpy()
        self._copies.append((host, elements))
        self._arrays.append(array)
        return PickleBuffer(array)

    def owns(self, memory: memoryview) -> bool:
        """Whether this memory is one of the copies."""
        return any(memory.obj is array for array in self._arrays)

    def begin(self) -> bool:
        """Copy, after the work that is on the current streams now; false if there is nothing to copy."""
        if not self._copies:
            return False
        streams: dict[torch.device, torch.Stream] = {}
        for host, elements in self._copies:
            device = elements.device
            stream = streams.get(device)
            if stream is None:
                stream = streams[device] = torch.Stream(device)
                stream.wait_event(_current_stream(device).record_event())
            with stream:
                host.copy_(elements, non_blocking=host.is_pinned())
            elements.record_stream(stream)
        self._events = [stream.record_event() for stream in streams.values()]
        self._copies.clear()
        return True

    def when_done(self, callback: Callable[[BaseException | None], object]) -> None:
        """Have ``callback`` called on a thread of the executor when all copies are made."""
        if not self._executor.submit((self._wait, callback)):
            callback(NotInitializedError("RPC was shut down before the tensors of a message were copied"))

    def _wait(self, callback: Callable[[BaseException | None], object]) -> None:
        try:
            for event in self._events:
                event.synchronize()
        except Exception as error:
            callback(error)
        else:
            callback(None)


def on_device(
    device: str,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    data: Any,
    requires_grad: bool,
) -> Tensor:
    """Rebuild a strided tensor on a device from its memory, on the current stream. Named in pickles."""
    target = _checked(device)
    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=target)
    span = layout_of(shape, stride).span
    if len(data) != span * tensor.itemsize:
        raise SerializationError(
            f"a tensor of shape {shape} and stride {stride} came with {len(data)} bytes, not its own"
        )
    if span:
        _copy_in(tensor.as_strided((span,), (1,)).view(torch.uint8), np.frombuffer(data, np.uint8))
    arrived(tensor)
    return tensor.requires_grad_(requires_grad)


def copied(
    device: str,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    memory: Import,
    requires_grad: bool,
) -> Tensor:
    """As ``on_device``, from memory of the sender's on this host. Named in pickles."""
    if type(memory) is not Import:
        raise SerializationError("a tensor on a device came without its memory")
    target = _checked(device)
    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=target)
    memory.copy_to(tensor.as_strided((layout_of(shape, stride).span,), (1,)).view(torch.uint8))
    arrived(tensor)
    return tensor.requires_grad_(requires_grad)


def host_memory(tensor: Tensor) -> Tensor:
    """Pinned memory for the elements of a contiguous tensor on a device, of its dtype and shape."""
    return _pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a contiguous tensor on a device to pinned memory, after the work on the current stream. Waits."""
    host = host_memory(tensor)
    copy_bytes(tensor, host)
    _current_stream(tensor.device).synchronize()
    return host


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy between a contiguous tensor of the host and one of a device, also of dtypes for whose elements
    PyTorch has no kernels. Does not wait if the former is pinned.
    """
    host = source if source.is_cpu else target
    target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8), non_blocking=host.is_pinned())


def _copy_in(target: Tensor, source: Any) -> None:
    with torch.accelerator.device_index(target.device.index):
        for start in range(0, len(source), _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            host = _pinned(len(piece))
            host.numpy()[:] = piece
            target[start : start + len(piece)].copy_(host, non_blocking=host.is_pinned())


def _checked(device: str) -> torch.device:
    """The local device of a name in a message."""
    try:
        target = torch.device(device)
    except RuntimeError:
        target = torch.device("cpu")
    mine = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if mine is None or target.type != mine.type or not 0 <= (target.index or 0) < count:
        has = "has no accelerator" if mine is None else f"has {count} devices of type '{mine.type}'"
        raise SerializationError(
            f"the sender's device map sends a tensor to device {device[:40]!r}, and this worker {has}"
        )
    return target


def _pinned(size: int) -> Tensor:
    """Pinned memory, or, where there is none, any."""
    if _pins():
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _tell(str(error))
    return torch.empty(size, dtype=torch.uint8, device="cpu")


@functools.cache
def _pins() -> bool:
    """Whether memory can be pinned for this accelerator."""
    try:
        return torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError as error:
        _tell(str(error))
        return False


_told: Final = threading.Event()


def _tell(reason: str) -> None:
    """Say once that copies block."""
    if not _told.is_set():
        _told.set()
        logger.warning("memory cannot be pinned (%s): copies of device tensors block their thread", reason)
