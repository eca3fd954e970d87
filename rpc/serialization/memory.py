"""Memory of tensors: out of a tensor into a buffer, and out of a buffer into a tensor.

Memory of up to ``INLINE_BYTES`` is copied into the pickle, which costs less than a separate buffer; so is
larger memory if a message has few tensors. Other memory becomes a buffer without being copied. A tensor's
memory is read through its address and never through ``Tensor.numpy()``, which would prevent resizing the
tensor for ever after.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any, Final, NamedTuple

import numpy as np
import torch

INLINE_BYTES: Final = 4096
_INLINE_TOTAL: Final = 48 << 10
"""Maximum total size of inlined memory in bytes, such that the message still is one small frame."""

_COPIED_BYTES: Final = 32 << 10
_SHARE_OF_FRAME: Final = 4
_ALIGNMENT: Final = 16

_ndarray: Final[Any] = np.ndarray

bytes_at: Final[Any] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""Copies bytes from an address: ``ctypes.string_at`` without its wrapper in Python. Arguments:
address, size.
"""


class _Region(ctypes.c_char * (1 << 62)):  # type: ignore[misc]  # an array type, made here
    """Memory from an address on, of which a view uses a part; keeps its owner alive.

    Each array type of another length would be a new class.
    """

    owner: object = None


def memory_at(address: int, size: int, owner: object) -> bytes | PickleBuffer:
    """Return ``size`` bytes of memory that ``owner`` keeps alive: a copy if small, otherwise the memory
    itself.
    """
    if not address and size:
        raise ValueError(f"{size} bytes that lie nowhere")
    if size <= INLINE_BYTES:
        copied: bytes = bytes_at(address, size)
        return copied
    region = _Region.from_address(address)
    region.owner = owner
    return PickleBuffer(_ndarray((size,), "B", region))


def inline_limit(tensors: int) -> int:
    """Return the maximum size in bytes at which each of a message's tensors is copied into its pickle."""
    return max(INLINE_BYTES, _INLINE_TOTAL // tensors) if tensors else INLINE_BYTES


def settle(buffer: Any) -> Any:
    """Return memory that the receiver's object can share and own: writable, aligned, and not a small part of
    something large that it would keep alive. It is the buffer itself if possible, otherwise a copy.
    """
    if type(buffer) is bytearray:
        return buffer
    view = memoryview(buffer)
    size = view.nbytes
    whole: Any = view.obj
    if type(whole) is _ndarray and size == whole.nbytes and size >= _COPIED_BYTES and not view.readonly:
        return view  # shared memory, or a block of the decoder's: aligned
    if (
        size < _COPIED_BYTES
        or view.readonly
        or size * _SHARE_OF_FRAME < memoryview(view.obj).nbytes
        or np.frombuffer(view, np.uint8).__array_interface__["data"][0] % _ALIGNMENT
    ):
        return bytearray(view)
    return view


def over(data: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor that shares the memory of ``data``; ``RuntimeError`` if the shape needs more."""
    if type(data) is bytes:
        data = bytearray(data)
    memory = torch.from_numpy(np.ndarray((len(data),), "B", data)).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, shape, stride)


def warm_up() -> None:
    """Use ``set_`` once. To be called on one thread, before others use ``over``: on its first use, PyTorch
    2.13 looks something up under a lock of its own, and releases the GIL there; a thread that waits for that
    lock while it holds the GIL then deadlocks.
    """
    over(b"\0", torch.uint8, (1,), (1,))


class Layout(NamedTuple):
    """How the elements of a strided tensor are laid out in memory."""

    span: int  # elements from the first to the last, including gaps
    distinct: int  # different elements, if none overlap; dimensions of stride 0 count once
    overlapping: bool  # some elements may share memory, other than through a stride of 0

    @property
    def dense(self) -> bool:
        """There are no gaps and no overlaps: the memory is exactly the elements, in some order."""
        return self.span == self.distinct and not self.overlapping


def layout_of(shape: Sequence[int], stride: Sequence[int]) -> Layout:
    """Analyse a shape and a stride, both in elements; strides are not negative.

    >>> layout_of((2, 3), (1, 2)).dense
    True
    >>> layout_of((5, 2), (5, 1))
    Layout(span=22, distinct=10, overlapping=False)
    """
    if 0 in shape:
        return Layout(0, 0, False)
    span = distinct = 1
    overlapping = False
    for step, count in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1 and s > 0):
        overlapping = overlapping or step < span
        span += step * (count - 1)
        distinct *= count
    return Layout(span, distinct, overlapping)
