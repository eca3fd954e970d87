"""Rebuilding tensors from untrusted parts: malformed ones raise ``SerializationError``."""

from __future__ import annotations

from typing import Any, Final

import torch

from rpc.errors import SerializationError
from rpc.serialization import tensor_kinds, tensors
from rpc.serialization.memory import layout_of

__all__ = ["constant", "on_meta", "placed", "sparse_compressed", "sparse_coo"]

_CONSTANTS: Final = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}
"""Collected in advance: looking names up in ``torch`` would import some of its modules."""


def constant(name: Any) -> Any:
    """``tensor_kinds.constant``."""
    found = _CONSTANTS.get(name) if type(name) is str else None
    if found is None:
        raise SerializationError(f"'torch.{name}' is no constant that can be sent")
    return found


def _item_size(dtype: Any) -> int:
    element = constant(dtype)
    if not isinstance(element, torch.dtype) or "qu" in dtype or "qint" in dtype:
        raise SerializationError(f"'torch.{dtype}' is no type of elements that can be sent")
    return element.itemsize


def _check_shape(shape: Any, stride: Any) -> None:
    are_tuples = type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride)
    if not are_tuples or not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, *stride)):
        raise SerializationError("a tensor has a malformed shape")


def placed(dtype: Any, shape: Any, stride: Any, data: Any, requires_grad: Any) -> torch.Tensor:
    """``tensors.placed``."""
    _check_shape(shape, stride)
    if layout_of(shape, stride).span * _item_size(dtype) > len(data):
        raise SerializationError("a tensor reaches beyond the memory that came with it")
    return tensors.placed(dtype, shape, stride, data, bool(requires_grad))


def on_meta(dtype: Any, shape: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    """``tensor_kinds.on_meta``."""
    _check_shape(shape, stride)
    _item_size(dtype)
    return tensor_kinds.on_meta(dtype, shape, stride, bool(requires_grad))


def sparse_coo(indices: Any, values: Any, *others: Any) -> torch.Tensor:
    """``tensor_kinds.sparse_coo``; all its indices are checked."""
    return tensor_kinds.sparse_coo(indices, values, *others, check=True)


def sparse_compressed(starts: Any, indices: Any, values: Any, *others: Any) -> torch.Tensor:
    """``tensor_kinds.sparse_compressed``; all its indices are checked."""
    return tensor_kinds.sparse_compressed(starts, indices, values, *others, check=True)
