"""Serialization of strided CPU tensors: their elements, and how these are laid out.

- A tensor is sent with its own elements, never the rest of its storage. It arrives with memory of its own:
  two views of one storage arrive as independent tensors. (One tensor object that occurs twice in a message
  arrives as one; the pickle's memo ensures that.)
- Strides are kept if there are no gaps: permuted tensors (``x.T``, channels last) are sent as they are in
  memory, and of an expanded one only the distinct elements. Gaps between elements (``x[:, ::2]``) that are no
  larger than the elements are kept, filled with zeros; larger ones are removed.
- ``requires_grad`` is kept, gradient history and ``grad`` are not: the tensor arrives as a leaf.
- The received tensor is writable and, as it shares the received bytes, cannot be resized with ``resize_``.

A tensor is reduced to ``(rebuild, arguments)``; the rebuilding functions below are named in the pickle. Usual
tensors that are arguments themselves are taken out of a message before it is pickled, and put back after
(``take_tensors``, ``fill_in``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rpc.errors import SerializationError
from rpc.runtime.torch_internals import neg_view
from rpc.serialization.memory import INLINE_BYTES, bytes_at, inline_limit, layout_of, memory_at, over
from rpc.serialization.payload import Connect, Tracked

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

WITH_GRAD: Final = 4
"""Number of arguments of ``dense`` for a tensor that requires grad."""

NUMBERS: Final = frozenset((NoneType, bool, int, float, complex))
SCALARS: Final = NUMBERS | {str, bytes}
SEQUENCES: Final = frozenset((list, tuple))
SHORT: Final = 64
"""Maximum number of items of a sequence whose types are checked one by one."""

SMALL_BYTES: Final = 1024
"""Size in bytes up to which copying takes no notable time."""

INLINE_LIMITS: Final = [inline_limit(count) for count in range(SHORT + 1)]

Taken = tuple[Sequence[Any], dict[str, Any], Sequence[Any]]
"""Arguments with None in place of tensors, and the tensors: positions or keywords, and arguments of
``dense``.
"""

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


def _without_gaps(tensor: Tensor) -> Any:
    """Return the arguments of ``dense`` for a small tensor with gaps or overlaps, such as the gradient of a
    sum.
    """
    usual = not tensor.__dict__ and tensor.layout is torch.strided and not tensor.is_nested
    return plain(tensor.contiguous()) if usual and tensor.nbytes <= SMALL_BYTES else None


def take_tensors(
    args: Sequence[Any], kwargs: dict[str, Any], tracked: Tracked = None, gradients: bool = False
) -> Taken | None:
    """Take usual tensors out of arguments that are otherwise scalars; None if there is anything else. Small
    ``gradients`` need not arrive with their gaps, and one that occurs twice may arrive as two.
    """
    tensors: list[Any] = []
    taken: list[Tensor] = []
    items, words = list(args), dict(kwargs)
    inline = INLINE_LIMITS[min(len(args) + len(kwargs), SHORT)]
    place: Any
    try:
        for place, value in itertools.chain(enumerate(args), kwargs.items()):
            kind = type(value)
            if kind is Tensor:
                usual = None if value.__dict__ else plain(value, inline)
                if usual is None and gradients:
                    usual = _without_gaps(value)
                if usual is None:
                    return None
                tensors.append((place, usual))
                taken.append(value)
                (words if type(place) is str else items)[place] = None
            elif kind not in SCALARS and not (kind in SEQUENCES and is_short_sequence(value)):
                return None
    except RuntimeError:
        return None  # a tensor inside a torch.func transform; the slow path reports which
    if len(taken) > 1 and not gradients and len(set(map(id, taken))) < len(taken):
        return None  # one tensor twice must arrive as one: the pickler's memo ensures it
    if tracked is not None:
        tracked += [tensor for tensor in taken if tensor.requires_grad]
    return items, words, tensors


def is_short_sequence(value: Any) -> bool:
    """Whether a list or tuple has only scalars, and so few that checking each costs less than a pickler."""
    return len(value) <= SHORT and SCALARS.issuperset(map(type, value))


def fill_in(items: list[Any], words: dict[str, Any], tensors: Sequence[Any], connect: Connect | None) -> None:
    """Put the tensors that ``take_tensors`` took out of a message back in their places."""
    rebuild: Any = dense
    with_grad: list[tuple[Any, Any]] = []
    values: list[Tensor] = []
    for place, usual in tensors:
        into: Any = words if type(place) is str else items
        if connect is None or len(usual) < WITH_GRAD:
            into[place] = rebuild(*usual)
        else:
            with_grad.append((into, place))
            values.append(rebuild(*usual[:3]))
    if connect is not None and values:
        for (into, place), tensor in zip(with_grad, connect(values), strict=True):
            into[place] = tensor


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
