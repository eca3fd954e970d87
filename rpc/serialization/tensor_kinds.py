"""Serialization of every other kind of tensor, each taken apart into strided tensors and put together again.

Sparse (COO, and the compressed layouts), quantized, nested, MKL-DNN and meta tensors; parameters, buffers and
subclasses; storages. Attributes set on a tensor travel with it. Subclasses that define ``__reduce_ex__``
themselves use that; wrapper subclasses use ``__tensor_flatten__``, and others without memory, such as masked
tensors, PyTorch's own reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.masked import MaskedTensor, as_masked_tensor
from torch.nn import Parameter
from torch.storage import TypedStorage, UntypedStorage

from rpc.errors import SerializationError
from rpc.runtime.torch_internals import (
    FSDP_FLATTENED,
    DisableTorchFunctionSubclass,
    is_fake,
    is_traceable_wrapper_subclass,
    is_transformed,
    make_per_channel_quantized_tensor,
    make_per_tensor_quantized_tensor,
    nested_view_from_buffer_copy,
)
from rpc.serialization.carriers import arrived
from rpc.serialization.memory import memory_at
from rpc.serialization.process_bound import FLATTENED
from rpc.serialization.tensors import dense, plain, reduce_strided
from rpc.serialization.tracked import is_tracked, take_out

_COMPRESSED_BY_ROW: Final = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMN: Final = (torch.sparse_csc, torch.sparse_bsc)
_WHOLE_BYTES: Final = (torch.quint8, torch.qint8, torch.qint32)
Shape = tuple[int, ...]

_IS_PARAMETER: Final = "_is_param"
"""What makes a tensor of a subclass a parameter."""

_OWN_REDUCE: Final = (Tensor.__reduce_ex__, Parameter.__reduce_ex__)


def reduce_tensor(tensor: Tensor, pickler: Any = None) -> Any:
    """Reduce any tensor; ``SerializationError`` if it is on a device that no device map has, or its memory
    was freed.
    """
    kind = type(tensor)
    tracked = getattr(pickler, "tracked", None)
    if tracked is not None and is_tracked(tensor, pickler.owned):
        if tensor.is_nested:
            return _reduce_nested_with_history(tensor)
        if isinstance(tensor, MaskedTensor):
            return _reduce_masked_with_history(tensor)
        reduced = take_out(tensor, tracked)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return reduced  # its attributes are its parts
    elif kind is Tensor:
        if not tensor.__dict__ and not is_transformed(tensor) and not _takes_cpu(pickler):
            usual = plain(tensor)
            if usual is not None:
                return dense, usual
        reduced = _reduce_by_layout(tensor, pickler)
    elif kind is Parameter:
        reduced = parameter, (tensor.detach(), tensor.requires_grad)
    elif kind.__reduce_ex__ not in _OWN_REDUCE:
        return NotImplemented
    else:
        with DisableTorchFunctionSubclass():
            if _is_wrapper(tensor):
                return _reduce_wrapper(tensor)
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return _reduce_dispatching(tensor)
            reduced = subclassed, (kind, tensor.detach().as_subclass(Tensor), tensor.requires_grad)
    attributes = tensor.__dict__
    if FSDP_FLATTENED in attributes:
        raise SerializationError(FLATTENED)
    if reduced[0] is arrived and _IS_PARAMETER in attributes:  # as a part of a graph it is none
        attributes = {name: value for name, value in attributes.items() if name != _IS_PARAMETER}
    if attributes:
        return (*reduced, attributes, None, None, set_attributes)
    return reduced


def set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Set the attributes of the original on a rebuilt tensor."""
    tensor.__dict__.update(attributes)


def _takes_cpu(pickler: Any) -> bool:
    """Whether CPU tensors of the message are sent to a device."""
    placement = getattr(pickler, "placement", None)
    return placement is not None and placement.takes_cpu


def _check_device(tensor: Tensor | UntypedStorage, pickler: Any) -> None:
    """Raise ``SerializationError`` if no device map has a tensor's device."""
    placement = getattr(pickler, "placement", None)
    if placement is not None:
        placement.target(tensor.device)
        return
    raise SerializationError(
        f"it is on device {tensor.device}, and RPC only supports CPU tensors in messages of this kind: move "
        "it to the CPU before sending it (tensor.cpu()), and back on the other side"
    )


def _reduce_by_layout(tensor: Tensor, pickler: Any = None) -> tuple[Any, ...]:
    requires_grad = tensor.requires_grad
    if is_transformed(tensor):
        raise SerializationError(
            "it belongs to a transform of torch.func, such as vmap, grad or jvp, inside which a tensor has "
            "no elements of its own: call other workers outside of the transform"
        )
    if tensor.is_meta:
        name = str(tensor.dtype).removeprefix("torch.")
        return on_meta, (name, (*tensor.shape,), tensor.stride(), requires_grad)
    if not tensor.is_cpu:
        _check_device(tensor, pickler)
    tensor = tensor.detach()
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        parts = tensor.values(), sizes, strides, tensor._nested_tensor_storage_offsets()
        return made, ("nested", requires_grad, *parts)
    shape, layout = (*tensor.shape,), tensor.layout
    if layout is torch.sparse_coo:
        return sparse_coo, (tensor._indices(), tensor._values(), shape, tensor.is_coalesced(), requires_grad)
    if layout in _COMPRESSED_BY_ROW:
        indices = tensor.crow_indices(), tensor.col_indices()
        return sparse_compressed, (*indices, tensor.values(), shape, layout, requires_grad)
    if layout in _COMPRESSED_BY_COLUMN:
        indices = tensor.ccol_indices(), tensor.row_indices()
        return sparse_compressed, (*indices, tensor.values(), shape, layout, requires_grad)
    if tensor.is_mkldnn:
        return made, ("mkldnn", requires_grad, tensor.to_dense())
    if tensor.is_quantized:
        return _reduce_quantized(tensor)
    return reduce_strided(tensor, requires_grad, pickler)


def _reduce_nested_with_history(tensor: Any) -> tuple[Any, ...]:
    """Reduce a nested tensor to the tensors that it is computed from, which can be part of the receiver's
    graph. (Custom functions of autograd do not accept nested tensors, and each one has ragged sizes of its
    own.)
    """
    if tensor.layout is not torch.jagged:
        return nested, (*tensor.unbind(),)
    sizes = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    return jagged, (tensor.values(), tensor.offsets(), tensor.lengths(), tensor._ragged_idx, *sizes)


def _reduce_masked_with_history(tensor: Any) -> tuple[Any, ...]:
    """Like ``_reduce_nested_with_history``, for a masked tensor."""
    return masked, (tensor.get_data(), tensor.get_mask())


def _reduce_quantized(tensor: Tensor) -> tuple[Any, ...]:
    scheme = tensor.qscheme()
    if tensor.dtype in _WHOLE_BYTES and scheme is torch.per_tensor_affine:
        return made, ("quantized", False, tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    if tensor.dtype in _WHOLE_BYTES and scheme is torch.per_channel_affine:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        parts = tensor.int_repr(), scales, zero_points, tensor.q_per_channel_axis()
        return made, ("quantized per channel", False, *parts)
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()
    # PyTorch's own reduction, which warns, knows the other schemes; the storage leaves the pickle here.
    reduced: tuple[Any, ...] = Tensor.__reduce_ex__(tensor, 5)  # type: ignore[no-untyped-call]  # untyped in torch
    return reduced


def _reduce_dispatching(tensor: Tensor) -> Any:
    """Reduce a tensor that has no memory and does not implement PyTorch's protocol for wrappers, such as a
    masked tensor, as PyTorch does: to its attributes.
    """
    if is_fake(tensor):
        raise SerializationError(
            "it is a fake tensor, which has a shape but no elements: send a tensor that is made outside of "
            "FakeTensorMode, or on device 'meta'"
        )
    return Tensor.__reduce_ex__(tensor, 5)  # type: ignore[no-untyped-call]  # untyped in torch


def _is_wrapper(tensor: object) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def _reduce_wrapper(tensor: Any) -> tuple[Any, ...]:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return wrapper, (type(tensor), inner, context, (*tensor.shape,), tensor.stride())


def parameter(tensor: Tensor, requires_grad: bool) -> Parameter:
    """Rebuild a ``torch.nn.Parameter``."""
    return Parameter(tensor, requires_grad)


def subclassed(kind: type[Tensor], tensor: Tensor, requires_grad: bool) -> Tensor:
    """Rebuild a tensor of a subclass that is not a wrapper."""
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(kind).requires_grad_(requires_grad)


def wrapper(kind: Any, inner: dict[str, Any], context: Any, shape: Shape, stride: Shape) -> Tensor:
    """Rebuild a tensor of a wrapper subclass from its inner tensors."""
    rebuilt: Tensor = kind.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
    return rebuilt


def nested(*tensors: Tensor) -> Tensor:
    """Rebuild a nested tensor of strided layout from its components, as a function of them."""
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.strided)


def jagged(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ragged_dim: int,
    min_length: int | None,
    max_length: int | None,
) -> Tensor:
    """Rebuild a nested tensor of jagged layout, as a function of its values."""
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, ragged_dim, min_length, max_length
    )


def masked(data: Tensor, mask: Tensor) -> Tensor:
    """Rebuild a masked tensor, as a function of its data."""
    rebuilt: Tensor = as_masked_tensor(data, mask)
    return rebuilt


def sparse_coo(
    indices: Tensor,
    values: Tensor,
    shape: Shape,
    coalesced: bool,
    requires_grad: bool,
    *,
    check: bool = False,
) -> Tensor:
    """Rebuild a sparse tensor in coordinate layout; it is coalesced if the original was."""
    tensor = torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=coalesced, check_invariants=check
    )
    return tensor.requires_grad_(requires_grad)


def sparse_compressed(
    starts: Tensor,
    indices: Tensor,
    values: Tensor,
    shape: Shape,
    layout: torch.layout,
    requires_grad: bool,
    *,
    check: bool = False,
) -> Tensor:
    """Rebuild a sparse tensor in CSR, CSC, BSR or BSC layout."""
    tensor = torch.sparse_compressed_tensor(
        starts, indices, values, shape, layout=layout, device=values.device, check_invariants=check
    )
    return tensor.requires_grad_(requires_grad)


_MAKERS: Final[dict[str, Callable[..., Tensor]]] = {
    "nested": nested_view_from_buffer_copy,
    "mkldnn": Tensor.to_mkldnn,
    "quantized": make_per_tensor_quantized_tensor,
    "quantized per channel": make_per_channel_quantized_tensor,
}


def made(kind: str, requires_grad: bool, *parts: Any) -> Tensor:
    """Rebuild a tensor that one of PyTorch's functions makes from its parts."""
    return _MAKERS[kind](*parts).requires_grad_(requires_grad)


def on_meta(dtype: str, shape: Shape, stride: Shape, requires_grad: bool) -> Tensor:
    """Rebuild a meta tensor, which has no elements."""
    empty = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    return empty.requires_grad_(requires_grad)


def reduce_constant(value: Any, _: object = None) -> tuple[Any, ...]:
    """Reduce one of PyTorch's named constants: a dtype, a layout, a memory format, a quantization scheme."""
    return constant, (str(value).removeprefix("torch."),)


def constant(name: str) -> Any:
    """Return PyTorch's constant with that name."""
    return getattr(torch, name)


def reduce_storage(storage: UntypedStorage | TypedStorage, pickler: Any = None) -> tuple[Any, ...]:
    """Reduce a storage, all of it."""
    if isinstance(storage, TypedStorage):
        return typed_storage, (storage.untyped(), storage.dtype)  # type: ignore[no-untyped-call]  # untyped in torch
    if storage.device.type != "cpu" or _takes_cpu(pickler):
        if storage.device.type != "cpu":
            _check_device(storage, pickler)
        return storage_of, (torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage),)
    return untyped_storage, (memory_at(storage.data_ptr(), storage.nbytes(), storage),)


def storage_of(tensor: Tensor) -> UntypedStorage:
    """Rebuild a storage from a tensor of its bytes."""
    return tensor.untyped_storage()


def untyped_storage(data: Any) -> UntypedStorage:
    """Rebuild a storage over ``data``."""
    if type(data) is bytes:
        data = bytearray(data)
    return torch.from_numpy(np.ndarray((len(data),), "B", data)).untyped_storage()


def typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """Rebuild a typed storage around an untyped one."""
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]  # untyped in torch
