"""Serialization of strided CPU tensors: their elements, and how these are laid out.

- A tensor is sent with its own elements, never the rest of its storage. It arrives with memory of its own:
  two views of one storage arrive as independent tensors. (One tensor object that occurs twice in a message
  arrives as one; the pickle's memo ensures that.)
- Strides are kept if there are no gaps: permuted tensors (``x.T``, channels last) are sent as they are in
  memory, and of an expanded one only the distinct elements. Gaps between elements (``x[:, ::2]``) that are no
  larger than the elements are kept, filled with zeros; larger ones are removed.
- ``requires_grad`` is kept, gradient history and ``grad`` are not: the tensor arrives as a leaf.
- The received tensor is writable and, as it shares the received bytes, cannot be resized with ``resize_``.

A tensor is reduced to ``(rebuild, arguments)``; the rebuilding functions below are named in the pickle.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rpc.errors import SerializationError
from rpc.runtime.torch_internals import neg_view
from rpc.serialization.memory import INLINE_BYTES, bytes_at, layout_of, memory_at, over

_CODES: Final[dict[torch.dtype, str]] = {
    torch.float32: "f",
    torch.float64: "d",
    torch.float16: "e",
    torch.bool: "?",
    torch.uint8: "B",
    torch.int8: "b",
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
}
"""NumPy's letters for the most frequent types, which are never conjugated."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""For each size in bytes, a type that can represent any other if elements are only copied."""

COMPUTED: Final = 2
"""Value of ``requires_grad`` in ``dense`` for a tensor that is not a leaf at its sender."""

_SMALL_SPAN: Final = 512
"""Maximum number of elements, including gaps, for which gaps of any size are kept."""

_STRIDED: Final = torch.strided
_from_numpy = torch.from_numpy
_ndarray = np.ndarray

_TYPES: Final = {code: np.dtype(code) for code in _CODES.values()}

ITEM_SIZES: Final = {code: kind.itemsize for code, kind in _TYPES.items()}
"""Size of an element in bytes, by the letter for ``dense``."""


_NAMES: Final = {code: str(dtype).removeprefix("torch.") for dtype, code in _CODES.items()}


def elements(made_by: object, arguments: Any) -> list[Any]:
    """Return the arguments of ``dense`` or ``placed`` as those of ``placed``, with lists in place
    of tuples.
    """
    if made_by is placed:
        dtype, shape, stride, data, requires_grad = arguments
        return [dtype, list(shape), list(stride), data, bool(requires_grad)]
    code, shape, data, *computed = arguments
    stride = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return [_NAMES[code], list(shape), stride, data, bool(computed and computed[0])]


def plain(tensor: Tensor, inline: int = INLINE_BYTES) -> tuple[Any, ...] | None:
    """Return the arguments of ``dense`` for a usual tensor: contiguous, on the CPU, of a usual type; None for
    any other.

    Args:
        tensor: its class must be exactly ``torch.Tensor``. Its attributes are ignored.
        inline: maximum size in bytes at which its elements are copied; larger memory is referred to.
    """
    code = _CODES.get(tensor.dtype)
    if (
        code is None
        or tensor.layout is not _STRIDED
        or not tensor.is_cpu
        or tensor.is_neg()
        or tensor.is_nested
        or not tensor.is_contiguous()
    ):
        return None
    address = tensor.data_ptr()
    size = tensor.nbytes
    if not address and size:
        return None
    data = bytes_at(address, size) if size <= inline else memory_at(address, size, tensor)
    if tensor.requires_grad:
        return code, (*tensor.shape,), data, True if tensor.grad_fn is None else COMPUTED
    return code, (*tensor.shape,), data


def dense(code: str, shape: tuple[int, ...], data: Any, requires_grad: bool = False) -> Tensor:
    """Rebuild a contiguous tensor of one of the usual types, over ``data``."""
    if type(data) is bytes:
        data = bytearray(data)
    tensor = _from_numpy(_ndarray(shape, _TYPES[code], data))
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def reduce_strided(tensor: Tensor, requires_grad: bool, departing: Any = None) -> tuple[Any, ...]:
    """Reduce a strided tensor, of class ``torch.Tensor`` and without gradient history, of any type and
    strides.

    Args:
        departing: the writer of the message, which maps devices; see ``Departing``.
    """
    if tensor.is_conj():
        return conjugated, (tensor.conj(), requires_grad)
    if tensor.is_neg():
        return negated, (neg_view(tensor), requires_grad)
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    shape, stride = (*tensor.shape,), tensor.stride()
    layout = layout_of(shape, stride)
    _check_memory(tensor, layout.span)
    name = str(tensor.dtype).removeprefix("torch.")
    if layout.dense or (layout.overlapping and layout.span <= layout.distinct):
        return _reduce_memory(tensor, layout.span, (name, shape, stride), requires_grad, departing)
    core = _copy_without_gaps(tensor)
    if not layout.overlapping and layout.span <= max(2 * layout.distinct, _SMALL_SPAN):
        loose = torch.zeros(layout.span, dtype=core.dtype, device=core.device)
        loose.as_strided(core.shape, stride).copy_(core)
        return _reduce_memory(loose, layout.span, (name, shape, stride), requires_grad, departing)
    kept = [step if old else 0 for step, old in zip(core.stride(), stride, strict=True)]
    return _reduce_memory(core, core.numel(), (name, shape, tuple(kept)), requires_grad, departing)


def _reduce_memory(
    tensor: Tensor, span: int, layout: tuple[Any, ...], requires_grad: bool, departing: Any
) -> tuple[Any, ...]:
    """Reduce a tensor to ``span`` elements starting at its first; ``layout`` is as for ``placed``."""
    placement = getattr(departing, "placement", None)
    if placement is not None and placement.target(tensor.device) is not None:
        elements = tensor.as_strided((span,), (1,))
        reduced: tuple[Any, ...] = placement.reduce(elements, layout, requires_grad, departing)
        return reduced
    data = memory_at(tensor.data_ptr(), span * tensor.itemsize, tensor)
    return placed, (*layout, data, requires_grad)


def _check_memory(tensor: Tensor, span: int) -> None:
    needed = (tensor.storage_offset() + span) * tensor.itemsize
    size = tensor.untyped_storage().nbytes()
    if span and needed > size:
        raise SerializationError(
            f"its memory was freed or cut short: it needs {needed} bytes of a storage of {size}"
        )


def _copy_without_gaps(tensor: Tensor) -> Tensor:
    """Return the distinct elements, contiguous; where the stride was 0, the size is 1."""
    core = tensor.as_strided(
        [n if step else 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)], tensor.stride()
    )
    return core.view(_INTEGERS[tensor.itemsize]).contiguous()


def placed(
    dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], data: Any, requires_grad: bool
) -> Tensor:
    """Rebuild a tensor whose memory is exactly ``data``, with strides in elements."""
    return over(data, getattr(torch, dtype), shape, stride).requires_grad_(requires_grad)


def conjugated(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Rebuild a tensor that is the lazy conjugate of its memory."""
    return tensor.conj().requires_grad_(requires_grad)


def negated(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Rebuild a tensor that is the lazy negative of its memory."""
    return neg_view(tensor).requires_grad_(requires_grad)
